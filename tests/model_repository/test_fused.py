"""The `fused` model without Triton, on a real engine: turns in, replies out."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from furcate.decoding.scheduler import Scheduler
from furcate.model_repository import answer, fused
from furcate.model_repository.engine_request import EngineDefaults
from furcate.model_repository.fused import Fused, Reply, Turn


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine("eagle3")


@pytest.fixture(scope="module")
def tokenizer(engine: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(engine / "tokenizer")


class Model:
    """A `Fused` and its scheduler, driven as Triton's iterative batcher drives it."""

    def __init__(self, engine: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.scheduler = Scheduler.from_engine(engine)
        self.failures: list[BaseException] = []
        self.fused = Fused(
            self.scheduler,
            defaults=EngineDefaults(end_ids=(), vocab_size=300),
            tokenizer=tokenizer,
            log_failure=self.failures.append,
        )

    def run_all(self, turns: list[Turn]) -> dict[int, list[Reply]]:
        """All replies of each turn's request, every live one in every batch."""
        replies: dict[int, list[Reply]] = {turn.key: [] for turn in turns}
        while turns:
            batch = self.fused.run(turns)
            for turn, reply in zip(turns, batch, strict=True):
                replies[turn.key].append(reply)
            pairs = zip(turns, batch, strict=True)
            turns = [Turn(key=turn.key, is_first=False) for turn, reply in pairs if not reply.is_last]
        return replies

    def assert_idle(self) -> None:
        assert self.fused.num_live == 0
        assert self.scheduler.num_allocated_pages == self.scheduler.num_committed_pages == 0


@pytest.fixture
def model(engine: Path, tokenizer: PreTrainedTokenizerFast) -> Model:
    return Model(engine, tokenizer)


def first_turn(key: int, *, max_tokens: int = 20, client_id: str = "", **inputs: object) -> Turn:
    tensors: dict[str, np.ndarray] = {
        "input_ids": np.array([[7 + key, 8, 9]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
    }
    for name, value in inputs.items():
        tensors[name] = value if isinstance(value, np.ndarray) else np.array([[value]])
    return Turn(key=key, is_first=True, client_id=client_id, tensors=tensors)


def tokens_of(replies: list[Reply]) -> list[int]:
    return [int(t) for reply in replies if reply.outputs for t in reply.outputs["output_ids"].reshape(-1)]


def reason_of(replies: list[Reply]) -> str:
    assert replies[-1].outputs is not None
    return replies[-1].outputs["finish_reason"][0, 0].decode()


def test_one_response_or_one_for_each_step_with_the_same_tokens(model: Model) -> None:
    replies = model.run_all([first_turn(1, streaming=False), first_turn(2, streaming=True)])
    alone = model.run_all([first_turn(1, streaming=True)])[1]
    assert len([reply for reply in replies[1] if reply.outputs]) == 1
    assert len([reply for reply in alone if reply.outputs]) > 5
    assert tokens_of(replies[1]) == tokens_of(alone)
    assert len(tokens_of(replies[1])) == len(tokens_of(replies[2])) == 20
    assert reason_of(replies[1]) == reason_of(replies[2]) == "length"
    model.assert_idle()


@pytest.mark.parametrize("is_streaming", [False, True])
def test_behind_the_ensemble_responses_without_results_show_who_is_still_there(
    model: Model, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    monkeypatch.setattr(fused, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(fused, "MOST_PROBES_PER_S", 1e9)
    asked = replace(first_turn(1, streaming=is_streaming), parameters={"response_interval_ms": 60_000})
    alone = [reply.outputs for reply in model.run_all([asked])[1] if reply.outputs]
    probed = [reply.outputs for reply in model.run_all([replace(asked, is_in_ensemble=True)])[1] if reply.outputs]
    probes = [outputs for outputs in probed if not outputs["answer_results"].item()]
    assert len(probes) > 5
    assert all(outputs["output_ids"].size == 0 and not outputs["finish_reason"].item() for outputs in probes)
    rest = [outputs for outputs in probed if outputs["answer_results"].item()]
    assert [outputs["output_ids"].tolist() for outputs in rest] == [outputs["output_ids"].tolist() for outputs in alone]
    model.assert_idle()


def test_many_live_requests_are_asked_for_less_often(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr(fused, "MOST_PROBES_PER_S", 1e-9)
    replies = model.run_all([replace(first_turn(1, streaming=False), is_in_ensemble=True)])[1]
    assert len([reply for reply in replies if reply.outputs]) == 1


def test_a_stream_s_tokens_are_gathered_for_the_time_it_asks_for(model: Model) -> None:
    every_step = first_turn(1, streaming=True)
    gathered = replace(every_step, parameters={"response_interval_ms": 60_000})
    replies = model.run_all([gathered])[1]
    assert len([reply for reply in replies if reply.outputs]) == 1
    assert tokens_of(replies) == tokens_of(model.run_all([every_step])[1])
    for wrong in (-1, 60_001):
        (reply,) = model.run_all([replace(every_step, parameters={"response_interval_ms": wrong})])[1]
        assert reply.error == (
            f"the request's parameter 'response_interval_ms' is {wrong}; it must be from 0 (every step) to 60000."
        )
    model.assert_idle()


def test_a_stream_responds_again_once_its_time_is_over(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(answer, "time", SimpleNamespace(monotonic=lambda: next(clock) * 0.05))
    turn = replace(first_turn(1, streaming=True), parameters={"response_interval_ms": 100})
    replies = model.run_all([turn])[1]
    responses = [index for index, reply in enumerate(replies) if reply.outputs]
    assert len(responses) > 2
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(responses[:-1]))


def test_responses_of_a_stream_say_what_came_before(model: Model) -> None:
    responses = [reply.outputs for reply in model.run_all([first_turn(1, streaming=True)])[1] if reply.outputs]
    earlier: list[int] = []
    for outputs in responses:
        assert outputs["earlier_ids"][0].tolist() == earlier
        assert outputs["answer_key"] == responses[0]["answer_key"]
        fresh = outputs["output_ids"][0, 0].tolist()
        assert outputs["num_output_tokens"].tolist() == [[len(fresh)]]  # clients of the old contract add them up
        earlier += fresh


def test_prompt_comes_first_when_asked_for(model: Model) -> None:
    turn = first_turn(1, exclude_input_in_output=False)
    outputs = model.run_all([turn])[1][-1].outputs
    assert outputs is not None
    ids = outputs["output_ids"][0, 0].tolist()
    assert ids[:3] == [8, 8, 9]
    assert ids[3:] == tokens_of(model.run_all([first_turn(1)])[1])
    assert (outputs["num_unsearched_ids"].item(), outputs["num_output_tokens"].item()) == (3, 20)


def test_a_refused_request_ends_alone(model: Model) -> None:
    alone = tokens_of(model.run_all([first_turn(1)])[1])
    replies = model.run_all([first_turn(1), first_turn(2, max_tokens=-1), first_turn(3, beam_width=np.int32(4))])
    assert tokens_of(replies[1]) == alone
    assert replies[2] == [Reply(error="max_tokens is -1; it must be at least 1.", is_last=True)]
    assert replies[3][0].error is not None
    assert replies[3][0].error.startswith("'beam_width' cannot be used")
    model.assert_idle()


def test_priority_and_timeout_reach_the_scheduler_and_wrong_ones_are_refused(model: Model) -> None:
    first = replace(first_turn(1), parameters={"priority_level": 7}, timeout_us=5_000_000)
    wrong = replace(first_turn(2), parameters={"priority_level": "high"})
    replies = model.fused.run([first, wrong])
    (sequence,) = model.scheduler.sequences.values()
    assert (sequence.request.priority, sequence.request.timeout_s) == (7, 5.0)
    assert replies[1].error == "the request's parameter 'priority_level' is 'high'; it must be a whole number."
    model.run_all([Turn(key=1, is_first=False)])
    model.assert_idle()


def test_a_second_request_with_the_same_beginning_reports_reused_pages(model: Model) -> None:
    prompt = np.arange(10, 60, dtype=np.int32)[None]
    counts = []
    for key in (1, 2):
        turn = first_turn(key, input_ids=prompt, input_lengths=np.array([[50]], np.int32))
        outputs = model.run_all([turn])[key][-1].outputs
        assert outputs is not None
        names = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
        counts.append([outputs[name].item() for name in names])
    assert [reused for _, reused, _ in counts] == [0, 3]
    assert all(new + reused == total for new, reused, total in counts)
    assert counts[0][2] == counts[1][2]
    model.assert_idle()


def test_a_crash_inside_a_step_ends_its_requests_and_the_model_lives(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tokens_of(model.run_all([first_turn(1)])[1])
    turns = [first_turn(1), first_turn(2)]
    model.fused.run(turns)
    # The real step is left half done: its pages are allocated when the blow falls.
    with monkeypatch.context() as patch:
        patch.setattr(model.scheduler, "_step_rows", lambda sequences: 1 / 0)
        replies = model.fused.run([Turn(key=turn.key, is_first=False) for turn in turns])
    assert [reply.error for reply in replies] == [
        "Server fault: a step failed (ZeroDivisionError) and its requests were ended; see the server's log."
    ] * 2
    assert all(reply.is_last for reply in replies)
    assert isinstance(model.failures[0], ZeroDivisionError)
    model.assert_idle()
    assert tokens_of(model.run_all([first_turn(1)])[1]) == alone


def test_cancel_by_id_frees_pages_at_once_and_ends_with_its_reason(model: Model) -> None:
    turns = [first_turn(1, client_id="one", streaming=True), first_turn(2, client_id="two", streaming=True)]
    model.fused.run(turns)
    pages = model.scheduler.num_allocated_pages
    (reply,) = model.fused.run([Turn(key=9, is_first=True, cancel_id="one")])
    assert reply.is_last
    assert reason_of([reply]) == "cancelled"
    assert model.scheduler.num_allocated_pages < pages
    replies = model.run_all([Turn(key=1, is_first=False), Turn(key=2, is_first=False)])
    assert reason_of(replies[1]) == "cancelled"
    assert len(replies[1]) == 1
    assert reason_of(replies[2]) == "length"
    model.assert_idle()


def test_cancel_of_an_unknown_id_says_so_and_holds_for_a_request_to_come(model: Model) -> None:
    (reply,) = model.fused.run([Turn(key=9, is_first=True, cancel_id="late")])
    assert reason_of([reply]) == "unknown"
    replies = model.run_all([first_turn(1, client_id="late")])[1]
    assert (reason_of(replies), tokens_of(replies)) == ("cancelled", [])
    assert reason_of(model.run_all([first_turn(1, client_id="late")])[1]) == "length"
    model.assert_idle()


def test_a_cancelled_request_gives_its_pages_back_before_its_next_turn(model: Model) -> None:
    model.fused.run([first_turn(1), first_turn(2)])
    pages = model.scheduler.num_allocated_pages
    model.fused.cancel(1)
    model.fused.cancel(1)
    model.fused.cancel(99)
    assert model.scheduler.num_allocated_pages < pages
    assert model.fused.num_live == 2
    replies = model.run_all([Turn(key=1, is_first=False), Turn(key=2, is_first=False)])
    assert (len(replies[1]), reason_of(replies[1]), reason_of(replies[2])) == (1, "cancelled", "length")
    model.assert_idle()


def test_asking_for_life_ends_no_request_without_an_id(model: Model) -> None:
    alone = tokens_of(model.run_all([first_turn(1)])[1])
    model.fused.run([first_turn(1)])
    (reply,) = model.fused.run([Turn(key=9, is_first=True, cancel_id="")])
    assert reason_of([reply]) == "unknown"
    replies = model.run_all([Turn(key=1, is_first=False)])[1]
    assert (reason_of(replies), tokens_of(replies)) == ("length", alone)
    model.assert_idle()


def test_a_request_that_gets_no_more_turns_can_be_dropped(model: Model) -> None:
    model.fused.run([first_turn(1)])
    assert model.scheduler.num_allocated_pages > 0
    model.fused.drop(1)
    model.fused.drop(1)
    model.assert_idle()


def test_an_answer_that_nobody_reads_is_ended_by_its_key(model: Model) -> None:
    turns = [first_turn(1, streaming=True), first_turn(2, streaming=True)]
    replies = model.fused.run(turns)
    while replies[0].outputs is None:
        replies = model.fused.run([Turn(key=turn.key, is_first=False) for turn in turns])
    pages = model.scheduler.num_allocated_pages
    model.fused.cancel_answer(12345)
    assert model.scheduler.num_allocated_pages == pages
    model.fused.cancel_answer(int(replies[0].outputs["answer_key"].item()))
    assert model.scheduler.num_allocated_pages < pages
    rest = model.run_all([Turn(key=1, is_first=False), Turn(key=2, is_first=False)])
    assert (len(rest[1]), reason_of(rest[1]), reason_of(rest[2])) == (1, "cancelled", "length")
    model.assert_idle()


def test_a_second_request_of_a_running_sequence_is_refused(model: Model) -> None:
    model.fused.run([first_turn(1)])
    (reply,) = model.fused.run([first_turn(1)])
    assert reply.error is not None
    assert reply.error.startswith("Sequence 1 is running already")


def test_an_unknown_sequence_is_an_error_not_a_crash(model: Model) -> None:
    (reply,) = model.fused.run([Turn(key=5, is_first=False)])
    assert reply == Reply(error="This request is not known here (any more); send it again.", is_last=True)


def test_stop_text_ends_the_generation_at_the_token_that_completes_it(
    model: Model, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The stop text is taken from the middle of a word of what the model says, so no token sequence is listed for it."""
    free = tokens_of(model.run_all([first_turn(1, max_tokens=40)])[1])
    texts = [tokenizer.decode([token]) for token in free]
    index = next(i for i in range(2, 30) if all(text.isascii() and text for text in texts[i : i + 2]))
    stop = texts[index] + texts[index + 1]
    for is_streaming in (False, True):
        stops = np.array([[stop.encode()]], np.object_)
        replies = model.run_all([first_turn(1, max_tokens=40, streaming=is_streaming, stop_texts=stops)])[1]
        assert reason_of(replies) == "stop"
        assert tokens_of(replies) == free[: len(tokens_of(replies))]
        assert stop in tokenizer.decode(tokens_of(replies))
        assert stop not in tokenizer.decode(tokens_of(replies)[:-1])
        assert len(tokens_of(replies)) < 40
    model.assert_idle()
