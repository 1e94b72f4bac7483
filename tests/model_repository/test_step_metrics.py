"""What the metrics say of a real scheduler's steps, without Triton."""

from collections.abc import Callable
from pathlib import Path

import pytest

from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.metrics_table import METRICS, STEP_PARTS, MetricKind
from furcate.model_repository.request_log import OUTCOMES
from furcate.model_repository.step_metrics import ObservedSteps, changes


@pytest.fixture(scope="module")
def scheduler(tiny_engine: Callable[..., Path]) -> Scheduler:
    return Scheduler.from_engine(tiny_engine("eagle3"))


@pytest.fixture
def steps(scheduler: Scheduler) -> ObservedSteps:
    return ObservedSteps(scheduler, max_depth=scheduler.manifest.tree.max_depth)


def request(request_id: int, max_tokens: int) -> Request:
    return Request(
        request_id=request_id, prompt_ids=(7 + request_id, 8, 9), sampling=SamplingParams(max_tokens=max_tokens)
    )


def counters(scheduler: Scheduler, steps: ObservedSteps) -> dict[tuple[str, str | None], float]:
    return steps.counters(scheduler.executor.clock.seconds, dict.fromkeys(OUTCOMES, 0))


def test_counters_add_up_to_what_the_requests_were_given(scheduler: Scheduler, steps: ObservedSteps) -> None:
    before = counters(scheduler, steps)
    steps.add(request(1, 30))
    steps.add(request(2, 11))
    live, stats, num_decode_steps, num_steps = [1, 2], {}, 0, 0
    while live:
        outputs = steps.step(live)
        had_pass = [request_id for request_id in live if request_id in stats]
        num_decode_steps += bool(had_pass)
        num_steps += 1
        stats |= {output.request_id: output.stats for output in outputs}
        live = [output.request_id for output in outputs if output.finish_reason is None]
    grown = dict(changes(before, counters(scheduler, steps)))
    num_passes = sum(one.num_target_steps for one in stats.values())
    num_accepted = sum(one.num_accepted_draft_tokens for one in stats.values())
    assert grown["furcate_tau_count", None] == grown["furcate_tau_bucket", "+Inf"] == num_passes
    assert grown["furcate_tau_sum", None] == num_passes + num_accepted
    assert grown["furcate_tree_nodes_total", None] == num_passes + sum(one.num_draft_tokens for one in stats.values())
    assert sum(value for (name, _), value in grown.items() if name == "furcate_accepted_total") == num_accepted
    assert grown["furcate_decode_steps_total", None] == num_decode_steps < num_steps
    assert grown["furcate_tokens_total", "prefill"] == 6
    assert all(grown["furcate_step_seconds_total", part] > 0 for part in STEP_PARTS)


def test_every_metric_of_the_table_is_given_and_no_other(scheduler: Scheduler, steps: ObservedSteps) -> None:
    gauges, counted = steps.gauges(), counters(scheduler, steps)
    for kind, given in ((MetricKind.GAUGE, gauges), (MetricKind.COUNTER, counted)):
        assert {name for name, _ in given} == {metric.name for metric in METRICS if metric.kind is kind}
    labelled = {metric.name for metric in METRICS if metric.label is not None}
    assert {name for name, value in {**gauges, **counted} if value is not None} == labelled


def test_gauges_follow_the_requests(scheduler: Scheduler, steps: ObservedSteps) -> None:
    steps.add(request(3, 50))
    assert steps.gauges()["furcate_prefilling_requests", None] == 1
    steps.step([3])
    steps.step([3])
    gauges = steps.gauges()
    assert gauges["furcate_running_requests", None] == gauges["furcate_batch_size", None] == 1
    assert gauges["furcate_pages_allocated", None] >= 1
    steps.cancel(3)
    gauges = steps.gauges()
    assert gauges["furcate_live_requests", None] == gauges["furcate_pages_allocated", None] == 0


def test_every_metric_has_its_row_in_the_documents() -> None:
    document = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    rows = [
        f"| `{metric.name}` | {metric.kind.value} | {metric.label or ''} | {metric.meaning} |" for metric in METRICS
    ]
    assert "\n".join(rows) in document


def test_names_follow_prometheus_conventions() -> None:
    for metric in METRICS:
        is_counter = metric.kind is MetricKind.COUNTER
        assert metric.name.startswith("furcate_")
        assert metric.name.endswith(("_total", "_bucket", "_sum", "_count")) == is_counter


def test_only_changes_are_sent_once_everything_has_a_value() -> None:
    before = {("a", None): 1.0, ("b", "x"): 2.0}
    assert dict(changes({}, before)) == before
    assert dict(changes(before, {("a", None): 1.0, ("b", "x"): 5.0, ("c", None): 0.0})) == {
        ("b", "x"): 3.0,
        ("c", None): 0.0,
    }
