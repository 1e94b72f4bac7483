"""Who is served when, who is refused, and what an observer sees of it."""

import itertools
import time

import pytest

from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError, RequestError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig, checked_scheduling
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from furcate.decoding.scheduler import Scheduler

CHUNK, NUM_PAGES = 16, 12


@pytest.fixture(scope="module")
def executor(tiny_engine) -> TorchExecutor:
    sizes = {"max_context_tokens": 170, "max_pool_tokens": 16 * NUM_PAGES, "prefill_chunk_tokens": CHUNK}
    return TorchExecutor(read_engine(tiny_engine("eagle3", tree="chain:2", **sizes)))


def scheduler_of(executor: TorchExecutor, **settings) -> Scheduler:
    return Scheduler(executor, scheduling=SchedulingConfig(**settings))


def request(number: int, length: int, max_tokens: int = 4, **more) -> Request:
    prompt = tuple(2 + (number * 31 + index) % 250 for index in range(length))
    return Request(request_id=number, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens), **more)


def run(scheduler: Scheduler) -> list[StepOutput]:
    outputs = []
    while scheduler.sequences:
        outputs += scheduler.step()
    assert scheduler.num_allocated_pages == scheduler.pool.num_promised == 0
    return outputs


def first_tokens(outputs: list[StepOutput]) -> list[int]:
    """The requests in the order of their first tokens."""
    return list(dict.fromkeys(output.request_id for output in outputs if output.token_ids))


def test_short_prompts_are_not_starved_by_a_long_one_nor_the_other_way_round(executor):
    scheduler = scheduler_of(executor, prefill_tokens_per_step=CHUNK)
    scheduler.add(request(0, 6 * CHUNK))
    scheduler.step()
    for number in range(1, 9):
        scheduler.add(request(number, 5, max_tokens=1))
        scheduler.step()
    # One step each in turn: the long prompt has had every second one, so it is through its prompt but one chunk.
    assert scheduler.sequences[0].cache_length == 5 * CHUNK
    assert 4 not in scheduler.sequences
    assert first_tokens(run(scheduler))[0] == 0


@pytest.mark.parametrize("budget", [5, 16, 40])
def test_a_step_takes_no_more_prompt_tokens_than_it_may(executor, budget):
    scheduler = scheduler_of(executor, prefill_tokens_per_step=budget, prefix_reuse=False)
    for number in range(3):
        scheduler.add(request(number, 30))
    taken = [0]
    while scheduler.sequences:
        scheduler.step()
        taken.append(scheduler.counts.totals.num_prefill_tokens)
    assert max(after - before for before, after in itertools.pairwise(taken)) <= budget
    assert taken[-1] == 90


def test_larger_priorities_come_first_and_equal_ones_in_order(executor):
    scheduler = scheduler_of(executor)
    for number, priority in enumerate([0, 0, 5, 0, 5]):
        scheduler.add(request(number, 100, priority=priority))
    # The first had room at once; of the others, only as many as the pool holds run together.
    assert first_tokens(run(scheduler)) == [0, 2, 4, 1, 3]


def test_too_many_waiting_requests_are_refused_and_those_with_room_are_not(executor):
    scheduler = scheduler_of(executor, max_waiting_requests=1)
    scheduler.add(request(0, 100))
    scheduler.add(request(1, 100))
    with pytest.raises(RequestError, match=r"^Server busy: 1 requests wait already, .*; send it again later\.$"):
        scheduler.add(request(2, 100))
    assert list(scheduler.sequences) == [0, 1]
    assert scheduler.counts.num_waiting == 1
    assert first_tokens(run(scheduler)) == [0, 1]
    totals = scheduler.counts.totals
    assert (totals.num_refused, totals.num_finished) == (1, 2)


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets so much time pass, by the clock that ages are taken from."""
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now + int(seconds * 1e9))


def test_a_request_that_waits_too_long_is_refused_and_a_running_one_is_not(executor, monkeypatch):
    scheduler = scheduler_of(executor, max_waiting_s=60)
    scheduler.add(request(0, 100))
    scheduler.add(request(1, 100))
    scheduler.step()
    pass_time(monkeypatch, 61)
    running, waiting = scheduler.step()
    assert (
        waiting.error == "Server busy: the request has waited 60 s for room, which is the longest; send it again later."
    )
    assert waiting.finish_reason is FinishReason.CANCELLED
    assert running.error is None
    assert run(scheduler)[-1].finish_reason is FinishReason.LENGTH


def test_a_request_ends_when_its_time_is_over(executor, monkeypatch):
    scheduler = scheduler_of(executor)
    scheduler.add(request(0, 20, max_tokens=40, timeout_s=30.0))
    while not scheduler.sequences[0].ending.token_ids:
        scheduler.step()
    num_tokens = len(scheduler.sequences[0].ending.token_ids)
    pass_time(monkeypatch, 31)
    (output,) = scheduler.step()
    assert output.error == (
        f"Timed out: the request's 30 s were over after {num_tokens} of 40 tokens; allow more time, or ask for fewer tokens."
    )
    assert not scheduler.sequences
    assert scheduler.num_allocated_pages == 0
    assert scheduler.counts.totals.num_overdue == scheduler.counts.totals.num_failed == 1


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_that_is_set_changes_neither_deadlines_nor_how_far_times_lie_apart(executor, monkeypatch, jump_s):
    scheduler = scheduler_of(executor, max_waiting_s=600)
    scheduler.add(request(0, 100, timeout_s=600.0))
    scheduler.add(request(1, 100, timeout_s=600.0))
    scheduler.step()
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(jump_s * 1e9))
    outputs = run(scheduler)
    assert first_tokens(outputs) == [0, 1]
    stats = outputs[-1].stats
    times = [stats.arrival_time_ns, stats.first_scheduled_time_ns, stats.first_token_time_ns, stats.last_token_time_ns]
    assert times == sorted(times)
    assert times[-1] - times[0] < 600e9


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(executor, timeout_s):
    with pytest.raises(RequestError, match=r"the request's timeout is .* s; it must be above 0"):
        scheduler_of(executor).add(request(0, 3, timeout_s=timeout_s))


@pytest.mark.parametrize("priority", [-101, 101])
def test_priorities_have_a_range(executor, priority):
    with pytest.raises(RequestError, match=f"priority is {priority}; it must be from -100 to 100"):
        scheduler_of(executor).add(request(0, 3, priority=priority))


def test_kept_pages_are_counted_apart_and_make_room(executor):
    scheduler = scheduler_of(executor)
    for number in range(4):
        scheduler.add(request(number, 80))
        run(scheduler)
    counts = scheduler.counts
    assert counts.num_cached_pages == NUM_PAGES - scheduler.pool.num_free > 0
    assert counts.num_allocated_pages == counts.num_committed_pages == 0
    assert counts.num_evicted_pages > 0
    scheduler.forget_prefixes()
    assert scheduler.counts.num_cached_pages == 0
    assert scheduler.pool.num_free == NUM_PAGES


def test_nothing_is_kept_of_a_step_that_failed(executor, monkeypatch):
    scheduler = scheduler_of(executor)
    scheduler.add(request(0, 40, max_tokens=20))
    while not scheduler.sequences[0].is_prefilled:
        scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler._step, "run", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.step()
    before = scheduler.counts.num_shared_pages
    scheduler.cancel(0)
    # What was shared before the failure is full of older rows; nothing was added to it.
    assert scheduler.counts.num_cached_pages == before == 2


def test_optimistic_promises_run_more_requests_together(executor):
    nums_running = {}
    for reservation in Reservation:
        scheduler = scheduler_of(executor, reservation=reservation)
        for number in range(4):
            scheduler.add(request(number, 10, max_tokens=60))
        nums_running[reservation] = 4 - scheduler.counts.num_waiting
        outputs = run(scheduler)
        assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.LENGTH] * 4
    assert nums_running == {Reservation.FULL: 2, Reservation.OPTIMISTIC: 4}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"prefill_tokens_per_step": 0}, "prefill_tokens_per_step is 0; it must be at least 1"),
        ({"max_waiting_requests": -1}, "max_waiting_requests is -1; it must be at least 0"),
        ({"max_waiting_s": 0.0}, "max_waiting_s is 0.0; it must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        checked_scheduling(SchedulingConfig(**setting))
