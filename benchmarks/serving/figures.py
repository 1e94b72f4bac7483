"""Figures of a load: throughput, times to the first and between tokens, tau."""

import statistics
from dataclasses import dataclass

from serving.load import Outcome


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One level of load. Times in ms, as the client sees them."""

    level: float
    """Requests at once, or requests a second."""
    num_requests: int
    num_failed: int
    seconds: float
    tokens_per_s: float
    tau: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float


def figures_of(outcomes: list[Outcome], level: float) -> Figures:
    """The figures of one level; requests that were cancelled or refused count as sent, their tokens as received."""
    seconds = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    stats = [o.generation.stats for o in outcomes if o.generation is not None]
    steps = sum(s.num_target_steps for s in stats)
    first = [1e3 * o.first_token_s for o in outcomes if o.first_token_s is not None]
    between = [1e3 * o.inter_token_s for o in outcomes if o.inter_token_s is not None]
    return Figures(
        level=level,
        num_requests=len(outcomes),
        num_failed=sum(o.failure is not None for o in outcomes),
        seconds=seconds,
        tokens_per_s=sum(len(o.token_ids) for o in outcomes) / seconds,
        tau=sum(s.num_emitted_tokens - 1 for s in stats) / max(steps, 1),
        first_token_p50_ms=quantile(first, 0.5),
        first_token_p99_ms=quantile(first, 0.99),
        inter_token_p50_ms=quantile(between, 0.5),
        inter_token_p99_ms=quantile(between, 0.99),
    )


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie; 0 of none, the only one of one."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]
