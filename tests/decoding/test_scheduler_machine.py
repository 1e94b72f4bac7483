"""Random arrivals, cancels and steps on a short pool: no page is lost, order is kept, all finish, and texts are as if alone."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from furcate.builder.engine import read_engine
from furcate.builder.scheduling_config import Reservation, SchedulingConfig
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.pass_times import PassTimes
from furcate.decoding.request import FinishReason, Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

SYSTEM = tuple(range(40, 75))
PROMPTS = [
    (*SYSTEM, 5, 6, 7),
    (*SYSTEM, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
    (*SYSTEM[:20], 7, 7, 7),
    SYSTEM[:16],
    tuple(range(100, 160)),
    (9,),
]
GREEDY, SEEDED = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, temperature=0.8, seed=5)
MOST_TOKENS = 45
NUM_PAGES = 9
"""The largest request needs 8 of them."""


def asked_for(prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int, priority: int = 0) -> Request:
    sampling = replace(sampling, max_tokens=max_tokens)
    return Request(request_id=0, prompt_ids=prompt, sampling=sampling, priority=priority)


ASKED = st.builds(
    asked_for,
    st.sampled_from(PROMPTS),
    st.sampled_from([GREEDY, SEEDED]),
    st.sampled_from([1, 12, 30, MOST_TOKENS]),
    st.sampled_from([0, 0, 0, 1]),
)

CONFIGS = {
    "full": SchedulingConfig(prefill_tokens_per_step=20),
    "optimistic": SchedulingConfig(reservation=Reservation.OPTIMISTIC, prefix_reuse=False),
    "optimistic, reusing": SchedulingConfig(reservation=Reservation.OPTIMISTIC),
    "optimistic, adaptive": SchedulingConfig(reservation=Reservation.OPTIMISTIC),
}
CHEAP_MS: dict = {"verify_ms": {1: 20, 64: 21}, "draft_ms": {0: 1, 8: 1}}
CHEAP = PassTimes(**CHEAP_MS)
DEAR = PassTimes(verify_ms={1: 10, 64: 600}, draft_ms={0: 1, 8: 3})
EACH_ITS_OWN = PassTimes(verify_ms={1: 10, 64: 35.2}, draft_ms={0: 0.0, 8: 0.0}, verify_sequence_ms=9.6)
"""Sequences cost, nodes hardly, and passes nothing: each is best off with its own size of tree."""
GAINS = (0.0, 1.0, 4.0)
NUM_PREEMPTED = dict.fromkeys(CONFIGS, 0)


@pytest.fixture(scope="module")
def executors(tiny_engine):
    """The same engine twice: one to be tried, one for texts alone."""
    sizes = {"prefill_chunk_tokens": 16, "max_batch_size": 3, "max_context_tokens": 110}
    engine = tiny_engine("eagle3", tree="dynamic:8/1/3", max_pool_tokens=16 * NUM_PAGES, **sizes)
    executors = [TorchExecutor(read_engine(engine)) for _ in range(2)]
    executors[0].manifest = replace(executors[0].manifest, tuning={"device": "cpu", **CHEAP_MS})
    return executors


@pytest.fixture(scope="module")
def text_alone(executors):
    """A request's text by itself: the beginning of the longest one, since tokens do not depend on what may follow."""
    plain = Scheduler(executors[1])

    @cache
    def longest(prompt, sampling):
        plain.add(Request(request_id=0, prompt_ids=prompt, sampling=replace(sampling, max_tokens=MOST_TOKENS)))
        text = ()
        while plain.sequences:
            text += plain.step()[0].token_ids
        return text

    def text(request):
        one = replace(request.sampling, max_tokens=1)
        return longest(request.prompt_ids, one)[: request.sampling.max_tokens]

    return text


def machine_of(executor, name, text_alone):
    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.scheduler = Scheduler(executor, scheduling=CONFIGS[name], is_adaptive="adaptive" in name)
            self.num_steps = 0
            self.requests: dict[int, Request] = {}
            self.texts: dict[int, tuple[int, ...]] = {}
            self.finished: set[int] = set()

        @initialize(asked=st.lists(ASKED, min_size=1, max_size=3))
        def begin(self, asked):
            """Three that begin with 6 pages together and end with 15, and some others."""
            long = [asked_for(PROMPTS[index], GREEDY, MOST_TOKENS) for index in (0, 2, 5)]
            for request in long + asked:
                self.add(request)

        @rule(asked=ASKED)
        def arrive(self, asked):
            self.add(asked)

        def add(self, asked):
            number = len(self.requests)
            self.requests[number], self.texts[number] = replace(asked, request_id=number), ()
            self.scheduler.add(self.requests[number])

        @precondition(lambda self: self.scheduler.sequences)
        @rule(index=st.integers(0, 9))
        def cancel(self, index):
            live = list(self.scheduler.sequences)
            if index < len(live):
                self.scheduler.cancel(live[index])
                assert live[index] not in self.scheduler.sequences

        @precondition(lambda self: self.scheduler.sequences)
        @rule(shares=st.lists(st.booleans(), min_size=8, max_size=8), count=st.integers(1, 8))
        def step(self, shares, count):
            """Steps of some of the live requests, as when others have their turn later."""
            for _ in range(count):
                ids = [number for number in self.scheduler.sequences if shares[number % 8]]
                self.make_trees_dear_or_cheap()
                self.take(self.scheduler.step(ids))

        def make_trees_dear_or_cheap(self):
            """An adaptive scheduler decodes plainly for three steps, and drafts in the next three, or each sequence as it likes."""
            ladder, self.num_steps = self.scheduler._ladder, self.num_steps + 1
            if ladder is None:
                return
            manner = self.num_steps // 3 % 3
            ladder.reckon_with((DEAR, CHEAP, EACH_ITS_OWN)[manner])
            for request_id, luck in ladder.lucks.items() if manner == 2 else ():
                luck.gain, luck.num_plain = GAINS[(request_id + self.num_steps) % 3], 0

        def take(self, outputs):
            for output in outputs:
                number = output.request_id
                self.texts[number] += output.token_ids
                if output.finish_reason is not None:
                    assert (output.finish_reason, output.error) == (FinishReason.LENGTH, None)
                    self.finished.add(number)

        @invariant()
        def no_page_is_lost(self):
            scheduler, counts = self.scheduler, self.scheduler.counts
            free = scheduler.pool.num_free
            assert free + counts.num_allocated_pages + counts.num_cached_pages == NUM_PAGES
            assert counts.num_allocated_pages == counts.num_committed_pages
            assert 0 <= scheduler.pool.num_promised <= free + counts.num_cached_pages
            held = [page for sequence in scheduler.sequences.values() for page in sequence.pages[len(sequence.nodes) :]]
            shared = {page for s in scheduler.sequences.values() for page in s.pages[: len(s.nodes)]}
            assert len(held) == len(set(held)) and not shared & set(held)
            assert len(held) + len(shared) == counts.num_allocated_pages

        @invariant()
        def order_is_kept(self):
            """Of equal priority, none has got room before one that came earlier and still waits for its first."""
            for priority in (0, 1):
                has_begun = [
                    sequence.stats.first_scheduled_time_ns is not None
                    for sequence in self.scheduler.sequences.values()
                    if sequence.request.priority == priority
                ]
                assert has_begun == sorted(has_begun, reverse=True)

        def teardown(self):
            for _ in range(600):
                if not self.scheduler.sequences:
                    break
                self.make_trees_dear_or_cheap()
                self.take(self.scheduler.step())
                self.no_page_is_lost()
            assert not self.scheduler.sequences, "a request never finishes"
            for number, request in self.requests.items():
                alone = text_alone(request)
                text = self.texts[number]
                assert text == (alone if number in self.finished else alone[: len(text)])
            counts = self.scheduler.counts
            assert counts.totals.num_finished + counts.totals.num_cancelled == len(self.requests)
            assert counts.num_allocated_pages == self.scheduler.pool.num_promised == 0
            NUM_PREEMPTED[name] += counts.totals.num_preempted

    return Machine


@pytest.mark.parametrize("num_lives", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_lives_on_a_short_pool(executors, text_alone, name, num_lives):
    run_state_machine_as_test(
        machine_of(executors[0], name, text_alone),
        settings=settings(
            max_examples=num_lives, stateful_step_count=12, deadline=None, derandomize=True, database=None
        ),
    )
    assert (NUM_PREEMPTED[name] > 0) == name.startswith("optimistic")
