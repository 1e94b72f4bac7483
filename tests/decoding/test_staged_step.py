"""A step in stages gives the tokens of the whole step, for every head; without Triton, each stage with an executor of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Guide, GuideKind, Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.staged_rules import check_staged
from furcate.decoding.staged_step import StagedScheduler
from furcate.decoding.stages import TreeConstruction, Verification, accept


class LocalStages:
    """The stages in this process; the two that hold weights share nothing."""

    def __init__(self, engine_dir: Path) -> None:
        engine = read_engine(engine_dir)
        tree = self.tree = engine.manifest.tree
        self.construction = TreeConstruction(TorchExecutor(engine), tree)
        self.verification = Verification(TorchExecutor(engine), tree)
        self.calls: list[str] = []

    def run(self, model_name: str, arrays: Mapping[str, np.ndarray], *, is_prompt: bool) -> dict[str, np.ndarray]:
        self.calls.append(model_name)
        if model_name != "speculative_step":
            stage = self.verification if model_name == "verification" else self.construction
            return stage.run_prompt(arrays) if is_prompt else stage.run(arrays)
        everything = {**arrays, **self.construction.run(arrays)}
        everything |= self.verification.run(everything)
        return {**everything, **accept(everything, self.tree.max_depth)}


def staged(engine_dir: Path) -> tuple[StagedScheduler, LocalStages]:
    stages = LocalStages(engine_dir)
    return StagedScheduler.of(read_engine(engine_dir), stages), stages


def request(request_id: int, **sampling: object) -> Request:
    params = {"max_tokens": 30, **sampling}
    return Request(
        request_id=request_id, prompt_ids=tuple(range(7, 10 + 3 * request_id)), sampling=SamplingParams(**params)
    )


def texts(scheduler: Scheduler, requests: list[Request]) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log probabilities of all requests, in one batch; a new one joins with every step."""
    found: dict[int, tuple] = {request.request_id: ((), ()) for request in requests}
    waiting = list(requests)
    while waiting or scheduler.sequences:
        if waiting:
            scheduler.add(waiting.pop(0))
        for output in scheduler.step():
            assert output.error is None
            ids, log_probs = found[output.request_id]
            found[output.request_id] = (ids + output.token_ids, log_probs + output.log_probs)
    return found


REQUESTS = [
    request(1),
    request(2, temperature=0.9, seed=5),
    request(3, temperature=1.3, seed=6, top_k=20, top_p=0.9, max_tokens=45),
    request(4, temperature=0.7, seed=2**63 + 9, min_p=0.05, returns_log_probs=True),
    request(60, max_tokens=12),
]


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        ("eagle3", {}),
        ("eagle3", {"prefill_chunk_tokens": 16}),
        ("eagle", {"tree": "chain:3"}),
        ("medusa", {}),
        (None, {}),
    ],
)
def test_staged_texts_are_the_fused_ones(
    head: str | None, settings: dict[str, object], tiny_engine: Callable[..., Path]
) -> None:
    engine_dir = tiny_engine(head, **settings)
    scheduler, _ = staged(engine_dir)
    whole = texts(Scheduler.from_engine(engine_dir, num_threads=1), REQUESTS)
    in_stages = texts(scheduler, REQUESTS)
    for key, (ids, log_probs) in whole.items():
        assert in_stages[key][0] == ids
        # Another batch may round a logit's last bit differently.
        assert in_stages[key][1] == pytest.approx(log_probs, abs=1e-4)
    assert scheduler.num_allocated_pages == 0


def test_a_step_is_one_call_and_what_ended_is_forgotten(tiny_engine: Callable[..., Path]) -> None:
    scheduler, stages = staged(tiny_engine("eagle3"))
    scheduler.add(request(1))
    scheduler.step()
    assert stages.calls == ["verification", "tree_construction"]
    scheduler.step()
    scheduler.step()
    assert stages.calls[2:] == ["speculative_step"] * 2
    scheduler.cancel(1)
    assert scheduler._step._kept == {}
    assert scheduler.num_allocated_pages == 0


PROCESSED = [
    request(1, repetition_penalty=1.4, frequency_penalty=0.3),
    request(2, temperature=1.1, seed=3, presence_penalty=0.5, embedding_bias=((40, 4.0), (41, -3.0))),
    request(3),
    request(4, min_tokens=9, end_ids=tuple(range(2, 250)), max_tokens=40),
    request(5, bad_sequences=((50,), (60, 61)), returns_log_probs=True),
    request(6, end_ids=(1,), guide=Guide(kind=GuideKind.REGEX, text="[ab]{5,9}c+"), temperature=0.8, seed=4),
    request(7, max_tokens=5, repetition_penalty=2.0),
]


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_tokens": 16}])
def test_processed_logits_give_the_fused_texts_and_are_forgotten(
    settings: dict[str, object], tiny_engine: Callable[..., Path]
) -> None:
    engine_dir = tiny_engine("eagle3", **settings)
    scheduler, stages = staged(engine_dir)
    whole = texts(Scheduler.from_engine(engine_dir, num_threads=1), PROCESSED)
    in_stages = texts(scheduler, PROCESSED)
    assert {key: ids for key, (ids, _) in in_stages.items()} == {key: ids for key, (ids, _) in whole.items()}
    texts(scheduler, [request(8)])
    assert stages.verification._texts._texts == {}


def test_optimistic_pages_are_refused(tiny_engine: Callable[..., Path]) -> None:
    engine = read_engine(tiny_engine("eagle3"))
    with pytest.raises(ConfigError, match="layout staged promises pages in full, and reservation is optimistic"):
        StagedScheduler.of(engine, LocalStages(engine.path), SchedulingConfig(reservation=Reservation.OPTIMISTIC))


@pytest.mark.parametrize(
    ("acceptance", "heads", "sentence"),
    [
        ("univer", ["eagle3"], "acceptance 'univer' needs its laws; use --layout fused"),
        ("match", ["model"], "not draft models; use --layout fused"),
        ("match", ["eagle", "medusa"], "serves engines with one head"),
    ],
)
def test_engines_that_cannot_be_cut_are_refused(acceptance: str, heads: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_staged(acceptance, heads)
