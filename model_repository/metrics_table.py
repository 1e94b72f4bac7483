"""The metrics that furcate adds to Triton's, as data: what is exported, documented, drawn and tested is all made from it.

Triton's own histogram kind is newer than 24.10, so the histogram of tau is made of counters with Prometheus's names and labels;
`histogram_quantile` works on it as on any.
"""

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """A gauge goes up and down, a counter only up."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One family. Every sample carries the label `engine`, and `label` with each of its values where there is one."""

    name: str
    kind: MetricKind
    meaning: str
    label: str | None = None


def _gauge(name: str, meaning: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, meaning=meaning)


def _counter(name: str, meaning: str, label: str | None = None) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, meaning=meaning, label=label)


TAU_BOUNDS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Upper bounds of the tau histogram's buckets, in tokens; a last one is unbounded."""
STEP_PARTS = ("draft", "verify", "accept", "commit", "prefill", "target_forward", "head_forward")
"""Parts of a step that are timed. The two forward passes lie inside the others."""

METRICS = (
    _gauge("furcate_live_requests", "Requests between their first step and their last"),
    _gauge("furcate_waiting_requests", "Live requests without room in the K/V pool"),
    _gauge("furcate_prefilling_requests", "Live requests in their prompt"),
    _gauge("furcate_running_requests", "Live requests past their prompt"),
    _gauge("furcate_batch_size", "Requests in the newest decode step"),
    _gauge("furcate_pages", "K/V pages in the pool"),
    _gauge("furcate_pages_allocated", "K/V pages held by live requests"),
    _gauge("furcate_pages_committed", "K/V pages that hold committed tokens of live requests"),
    _gauge("furcate_pages_shared", "K/V pages of live requests that others may use too"),
    _gauge("furcate_pages_cached", "K/V pages kept only for requests to come"),
    _counter("furcate_requests_total", "Requests by how they ended: a finish reason, or why there is none", "outcome"),
    _counter("furcate_preemptions_total", "Running requests put back in line"),
    _counter("furcate_tokens_total", "Tokens: prefill (computed), reused (not computed), decode (generated)", "phase"),
    _counter("furcate_reused_pages_total", "K/V pages that requests did not have to compute"),
    _counter("furcate_evicted_pages_total", "Kept K/V pages given up for others"),
    _counter("furcate_decode_steps_total", "Decode steps of the whole batch"),
    _counter("furcate_tree_nodes_total", "Tree nodes verified, roots included, summed over requests"),
    _counter("furcate_tau_bucket", "Target passes of one request that yielded at most le tokens", "le"),
    _counter("furcate_tau_sum", "Tokens that target passes yielded, summed over requests"),
    _counter("furcate_tau_count", "Target passes, summed over requests"),
    _counter(
        "furcate_accepted_total", "Target passes of one request that accepted a draft token at this depth", "depth"
    ),
    _counter("furcate_step_seconds_total", "Seconds spent in the parts of a step", "part"),
)
"""What is accepted at depth d over what was accepted at d - 1 (at depth 1: over furcate_tau_count) is depth d's acceptance."""
