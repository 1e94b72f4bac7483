"""What an observer may want to know of a scheduler: how many requests stand where, and what has been done so far."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from furcate.decoding.request import StepOutput
from furcate.decoding.sequence import Sequence
from furcate.decoding.sequence_pages import SequencePages


@dataclass
class Totals:
    """Counts that only grow, over a scheduler's life."""

    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    """Ended by an error of their own, overdue ones included."""
    num_overdue: int = 0
    """Ended because their time, or the longest wait, was over."""
    num_refused: int = 0
    """Never taken in: not right, or too many waiting."""
    num_preempted: int = 0
    """Times that a running request was put back in line."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed; what was reused is not among them."""
    num_decode_tokens: int = 0
    """Tokens that decode steps gave, before any text's end was cut."""
    num_reused_tokens: int = 0
    """Prompt tokens that did not have to be computed."""

    def count_end(self, output: StepOutput) -> None:
        """Counts a request by its last output."""
        if output.error is None:
            self.num_finished += 1
        else:
            self.num_failed += 1


@dataclass(frozen=True, kw_only=True)
class SchedulerCounts:
    """A scheduler between two steps."""

    num_waiting: int
    """Live requests without room in the pool."""
    num_prefilling: int
    """Live requests in their prompt."""
    num_running: int
    """Live requests past their prompt."""
    num_pages: int
    num_allocated_pages: int
    """Pages of live requests, a shared one counted once."""
    num_committed_pages: int
    """Of these, the pages that committed tokens fill."""
    num_shared_pages: int
    """Of the allocated pages, those that others may use too."""
    num_cached_pages: int
    """Pages that only prefix reuse keeps; they are free for whoever needs them."""
    num_reused_pages: int
    """Pages that requests did not have to compute, since the beginning."""
    num_evicted_pages: int
    """Kept pages given up for others, since the beginning."""
    totals: Totals


def counts_of(sequences: Collection[Sequence], pages: SequencePages, totals: Totals) -> SchedulerCounts:
    """The counts of these live sequences."""
    live = [sequence for sequence in sequences if not sequence.is_waiting]
    num_running = sum(sequence.is_prefilled for sequence in live)
    return SchedulerCounts(
        num_waiting=len(sequences) - len(live),
        num_prefilling=len(live) - num_running,
        num_running=num_running,
        num_pages=pages.pool.num_pages,
        num_allocated_pages=pages.num_allocated,
        num_committed_pages=num_committed_pages(sequences, pages),
        num_shared_pages=pages.num_shared,
        num_cached_pages=pages.num_cached,
        num_reused_pages=pages.num_reused,
        num_evicted_pages=pages.num_evicted,
        totals=replace(totals),
    )


def num_committed_pages(sequences: Collection[Sequence], pages: SequencePages) -> int:
    """Pages that committed tokens of live sequences fill, a shared one counted once."""
    own = (pages.pool.pages_for(sequence.cache_length) - len(sequence.nodes) for sequence in sequences)
    return sum(own) + pages.num_shared
