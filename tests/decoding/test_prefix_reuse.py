"""Requests that begin with kept pages say what they would have said without: every head, greedy and seeded."""

from pathlib import Path

import pytest
import torch

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.scheduling_config import SchedulingConfig
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

KINDS = ["none", "eagle3", "eagle", "medusa", "hydra", "hydra-prefix", "model"]
GREEDY = SamplingParams(max_tokens=12)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=11)


def random_ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


SYSTEM = random_ids(0, 50)
PROMPTS = [
    SYSTEM + random_ids(1, 9),
    SYSTEM + random_ids(2, 30),
    SYSTEM[:40] + random_ids(3, 5),
    SYSTEM + random_ids(1, 9) + random_ids(4, 20),
    SYSTEM[:1],
    SYSTEM[:17],
    SYSTEM[:48],
    SYSTEM[:49],
]


@pytest.fixture(scope="module")
def engine_of(tiny_engine, engine_with, tiny_heads, more_heads, noisy_target):
    """An engine with each kind of drafter; its pool is big enough for everything to be kept."""

    def build(kind: str) -> Path:
        settings: dict[str, object] = {"max_pool_tokens": 16384}
        if kind != "none":
            settings["tree"] = "dynamic:12/2/3"
        if kind in more_heads:
            return engine_with(more_heads[kind], **settings)
        if kind == "medusa and model":
            heads = (tiny_heads["medusa"], noisy_target)
            return engine_with(heads, acceptance=Acceptance.MATCH, max_pool_tokens=16384)
        if kind == "model":
            return engine_with(noisy_target, acceptance=Acceptance.MATCH, **settings)
        return tiny_engine(None if kind == "none" else kind, **settings)

    return build


def plain_and_reusing(engine: Path, **settings) -> tuple[Scheduler, Scheduler]:
    """Two schedulers, each with a cache of its own."""
    plain, reusing = (TorchExecutor(read_engine(engine)) for _ in range(2))
    return Scheduler(plain, **settings), Scheduler(reusing, scheduling=SchedulingConfig(), **settings)


def text_of(scheduler: Scheduler, prompt: tuple[int, ...], sampling: SamplingParams):
    """One request alone: its text and its last output's stats."""
    scheduler.add(Request(request_id=0, prompt_ids=prompt, sampling=sampling))
    text: tuple[int, ...] = ()
    while scheduler.sequences:
        (output,) = scheduler.step()
        assert scheduler.num_allocated_pages == scheduler.num_committed_pages
        assert output.error is None
        text += output.token_ids
    assert scheduler.num_allocated_pages == scheduler.pool.num_promised == 0
    return text, output.stats


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same_with_and_without_reuse(engine_of, kind):
    plain, reusing = plain_and_reusing(engine_of(kind))
    for index, prompt in enumerate(PROMPTS):
        sampling = (GREEDY, SEEDED)[index % 2]
        expected, old = text_of(plain, prompt, sampling)
        text, new = text_of(reusing, prompt, sampling)
        assert text == expected
        # Drafts are what they were, too: the drafter's rows and state are the same after a hit.
        assert new.num_target_steps == old.num_target_steps
        assert new.num_accepted_draft_tokens == old.num_accepted_draft_tokens
    assert reusing.counts.num_reused_pages >= 3 + 2 + 3 + 0 + 1 + 2 + 3
    assert reusing.counts.num_cached_pages > 0
    assert plain.counts.num_cached_pages == plain.counts.num_reused_pages == 0


@pytest.mark.parametrize("kind", [*KINDS, "medusa and model"])
def test_a_conversation_goes_on_from_what_was_generated(engine_of, kind):
    """The next prompt holds the last answer: its rows are reused as if they had been a prompt's."""
    plain, reusing = plain_and_reusing(engine_of(kind))
    prompt = random_ids(20, 20)
    answer, _ = text_of(reusing, prompt, SEEDED)
    for turn in range(2):
        prompt = (*prompt, *answer, *random_ids(30 + turn, 3))
        answer, stats = text_of(reusing, prompt, SEEDED)
        assert answer == text_of(plain, prompt, SEEDED)[0]
        # All but what was not final: the new tokens, the answer's last one, and a draft model's rows of the last step.
        assert stats.num_reused_tokens >= len(prompt) - 3 - 1 - 8
        assert stats.num_reused_pages == stats.num_reused_tokens // 16
