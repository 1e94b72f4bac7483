"""`furcate top`: what a server is doing now, in the terminal, from its metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from furcate.builder.errors import ConfigError
from furcate.client.metrics_text import Samples, scrape


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    """Show what a server is doing: requests, pages, tokens a second, tau, acceptance by depth, where a step's time goes.

    Figures of the last interval, read from the server's metrics; with --once, of the server's life so far.

    examples:
      furcate top
      furcate top --url http://127.0.0.1:8002/metrics --interval-s 5
      furcate top --once
    """

    url: str = "http://127.0.0.1:8002/metrics"
    """The metrics page."""
    interval_s: float = 2.0
    """Between two looks."""
    once: bool = False
    """Print one table and end."""


def run(arguments: Sequence[str]) -> None:
    """Shows the table until Ctrl-C; ServerError when the server does not answer."""
    config = tyro.cli(TopConfig, prog="furcate top", args=arguments)
    if config.interval_s <= 0:
        raise ConfigError(f"--interval-s is {config.interval_s:g}; it must be above 0 seconds.")
    now, console = scrape(config.url), Console()
    if config.once:
        console.print(view(Samples(values={}), now, None))
        return
    with Live(view(now, now, config.interval_s), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(config.interval_s)
            before, now = now, scrape(config.url)
            live.update(view(before, now, config.interval_s), refresh=True)


def view(before: Samples, now: Samples, seconds: float | None) -> Group:
    """The tables for what happened between two moments; `seconds` lie between them (None: unknown, no rates)."""
    return Group(_requests(before, now), _tokens(before, now, seconds), _depths(before, now), _parts(before, now))


def _requests(before: Samples, now: Samples) -> Table:
    table = Table(
        "requests", "waiting", "prefilling", "running", "batch", "pages held", "kept", "ended", title_justify="left"
    )
    ended = _grown(before, now, "outcome", "furcate_requests_total")
    table.add_row(
        f"{now.sum('furcate_live_requests'):.0f} live",
        *(f"{now.sum(f'furcate_{part}_requests'):.0f}" for part in ("waiting", "prefilling", "running")),
        f"{now.sum('furcate_batch_size'):.0f}",
        f"{now.sum('furcate_pages_allocated'):.0f} of {now.sum('furcate_pages'):.0f}",
        f"{now.sum('furcate_pages_cached'):.0f}",
        ", ".join(f"{count:.0f} {outcome}" for outcome, count in sorted(ended.items()) if count) or "none",
    )
    return table


def _tokens(before: Samples, now: Samples, seconds: float | None) -> Table:
    tokens = _grown(before, now, "phase", "furcate_tokens_total")
    passes = _growth(before, now, "furcate_tau_count")
    unit = "" if seconds is None else "/s"
    table = Table("tokens", *(f"{phase}{unit}" for phase in ("prefill", "reused", "decode")), "tau", "nodes a tree")
    per = seconds or 1.0
    table.add_row(
        "all" if seconds is None else f"{seconds:g} s",
        *(f"{tokens.get(phase, 0.0) / per:,.1f}" for phase in ("prefill", "reused", "decode")),
        _ratio(_growth(before, now, "furcate_tau_sum"), passes),
        _ratio(_growth(before, now, "furcate_tree_nodes_total"), passes),
    )
    return table


def _depths(before: Samples, now: Samples) -> Table:
    accepted = _grown(before, now, "depth", "furcate_accepted_total")
    depths = sorted(accepted, key=int)
    reached = [_growth(before, now, "furcate_tau_count"), *(accepted[depth] for depth in depths)]
    table = Table("acceptance at depth", *depths)
    table.add_row("of those that got there", *(_share(*pair) for pair in zip(reached[1:], reached[:-1], strict=True)))
    return table


def _parts(before: Samples, now: Samples) -> Table:
    seconds = _grown(before, now, "part", "furcate_step_seconds_total")
    steps = _growth(before, now, "furcate_decode_steps_total")
    parts = [part for part in ("draft", "verify", "accept", "commit") if part in seconds]
    table = Table("ms a step", *parts)
    table.add_row("", *(_ratio(1000 * seconds[part], steps) for part in parts))
    return table


def _growth(before: Samples, now: Samples, name: str) -> float:
    return now.sum(name) - before.sum(name)


def _grown(before: Samples, now: Samples, label: str, name: str) -> dict[str, float]:
    earlier = before.by(label, name)
    return {key: value - earlier.get(key, 0.0) for key, value in now.by(label, name).items()}


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "-"


def _share(value: float, base: float) -> str:
    return f"{100 * value / base:.0f}%" if base else "-"
