"""Figures of a load: throughput, times to the first and between tokens, tau."""

import statistics
from dataclasses import dataclass

from rich.table import Table

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


def plain_figures(level: float, num_requests: int, tokens_per_s: float) -> Figures:
    """Figures of a system of which only throughput is known."""
    zeros = dict.fromkeys(("first_token_p50_ms", "first_token_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms"), 0.0)
    return Figures(
        level=level, num_requests=num_requests, num_failed=0, seconds=0.0, tokens_per_s=tokens_per_s, tau=0.0, **zeros
    )


def table_of(rows: list[tuple[str, Figures]], level_name: str) -> Table:
    """Figures as a table."""
    table = Table(
        level_name, "system", "requests", "failed", "tokens/s", "tau", "first ms p50/p99", "between ms p50/p99"
    )
    for system, f in rows:
        table.add_row(
            f"{f.level:g}",
            system,
            str(f.num_requests),
            str(f.num_failed),
            f"{f.tokens_per_s:.1f}",
            f"{f.tau:.2f}" if f.tau else "",
            f"{f.first_token_p50_ms:.0f} / {f.first_token_p99_ms:.0f}" if f.first_token_p50_ms else "",
            f"{f.inter_token_p50_ms:.1f} / {f.inter_token_p99_ms:.1f}" if f.inter_token_p50_ms else "",
        )
    return table
