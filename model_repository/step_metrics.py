"""What the metrics say of a scheduler: its counts, and what can be learned from the outputs of its steps."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from furcate.decoding.counts import SchedulerCounts
from furcate.decoding.request import Request, RequestStats, StepOutput
from furcate.model_repository.metrics_table import STEP_PARTS, TAU_BOUNDS

Sample = tuple[str, str | None]
"""A metric's name, and the value of its label where it has one."""


class CountedSteps(Protocol):
    """What this module needs of `furcate.decoding.scheduler.Scheduler`."""

    @property
    def counts(self) -> SchedulerCounts: ...
    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def step(self, request_ids: Sequence[int]) -> list[StepOutput]: ...


class ObservedSteps:
    """A scheduler that is watched. `samples` are all values of the metrics so far; `max_depth` is the tree's deepest level."""

    def __init__(self, scheduler: CountedSteps, *, max_depth: int) -> None:
        self._scheduler = scheduler
        self._before: dict[int, RequestStats] = {}
        """Of live requests: their statistics after the last step."""
        self._num_by_tau: defaultdict[int, int] = defaultdict(int)
        self._num_by_depth = dict.fromkeys(range(1, max_depth + 1), 0)
        self._num_steps = 0
        self._num_nodes = 0
        self._batch_size = 0

    def add(self, request: Request) -> None:
        """As the scheduler's."""
        self._scheduler.add(request)

    def cancel(self, request_id: int) -> None:
        """As the scheduler's."""
        self._before.pop(request_id, None)
        self._scheduler.cancel(request_id)

    def step(self, request_ids: Sequence[int]) -> list[StepOutput]:
        """As the scheduler's; its outputs are counted."""
        outputs = self._scheduler.step(request_ids)
        batch_size = sum(self._count(output) for output in outputs)
        if batch_size:
            self._num_steps += 1
            self._batch_size = batch_size
        return outputs

    def _count(self, output: StepOutput) -> bool:
        """True when the request took part in the decode step."""
        stats = output.stats
        before = self._before.get(output.request_id) or RequestStats(num_prompt_tokens=0)
        if output.finish_reason is None:
            self._before[output.request_id] = stats
        else:
            self._before.pop(output.request_id, None)
        if stats.num_target_steps == before.num_target_steps:
            return False
        num_accepted = stats.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        self._num_by_tau[num_accepted + 1] += 1
        self._num_nodes += 1 + stats.num_draft_tokens - before.num_draft_tokens
        for depth in range(1, num_accepted + 1):
            self._num_by_depth[depth] = self._num_by_depth.get(depth, 0) + 1
        return True

    def gauges(self) -> dict[Sample, float]:
        """Where the requests and pages stand now."""
        counts = self._scheduler.counts
        num_live = counts.num_waiting + counts.num_prefilling + counts.num_running
        return {
            ("furcate_live_requests", None): num_live,
            ("furcate_waiting_requests", None): counts.num_waiting,
            ("furcate_prefilling_requests", None): counts.num_prefilling,
            ("furcate_running_requests", None): counts.num_running,
            ("furcate_batch_size", None): self._batch_size if num_live else 0,
            ("furcate_pages", None): counts.num_pages,
            ("furcate_pages_allocated", None): counts.num_allocated_pages,
            ("furcate_pages_committed", None): counts.num_committed_pages,
            ("furcate_pages_shared", None): counts.num_shared_pages,
            ("furcate_pages_cached", None): counts.num_cached_pages,
        }

    def counters(self, seconds: Mapping[str, float], outcomes: Mapping[str, int]) -> dict[Sample, float]:
        """What has been done so far; `seconds` are those of the step's parts, `outcomes` counts how requests ended."""
        counts = self._scheduler.counts
        totals = counts.totals
        return {
            **{("furcate_requests_total", outcome): count for outcome, count in outcomes.items()},
            ("furcate_preemptions_total", None): totals.num_preempted,
            ("furcate_tokens_total", "prefill"): totals.num_prefill_tokens,
            ("furcate_tokens_total", "reused"): totals.num_reused_tokens,
            ("furcate_tokens_total", "decode"): totals.num_decode_tokens,
            ("furcate_reused_pages_total", None): counts.num_reused_pages,
            ("furcate_evicted_pages_total", None): counts.num_evicted_pages,
            ("furcate_decode_steps_total", None): self._num_steps,
            ("furcate_tree_nodes_total", None): self._num_nodes,
            **self._tau_samples(),
            **{("furcate_accepted_total", str(depth)): count for depth, count in self._num_by_depth.items()},
            **{("furcate_step_seconds_total", part): seconds.get(part, 0.0) for part in STEP_PARTS},
        }

    def _tau_samples(self) -> dict[Sample, float]:
        def num_up_to(bound: float) -> int:
            return sum(count for tau, count in self._num_by_tau.items() if tau <= bound)

        num_passes = num_up_to(float("inf"))
        return {
            **{("furcate_tau_bucket", str(bound)): num_up_to(bound) for bound in TAU_BOUNDS},
            ("furcate_tau_bucket", "+Inf"): num_passes,
            ("furcate_tau_sum", None): sum(tau * count for tau, count in self._num_by_tau.items()),
            ("furcate_tau_count", None): num_passes,
        }


def changes(before: Mapping[Sample, float], after: Mapping[Sample, float]) -> Iterable[tuple[Sample, float]]:
    """By how much each sample has grown, or its first value; unchanged ones are left out."""
    for sample, value in after.items():
        growth = value - before.get(sample, 0.0)
        if growth or sample not in before:
            yield sample, growth
