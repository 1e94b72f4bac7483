"""Draws a load's figures as PNG."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

from serving.figures import Figures
from serving.memory import MemorySample

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_levels(curves: Mapping[str, list[Figures]], path: Path, *, title: str, level_name: str) -> None:
    """Throughput, time to first token, time between tokens and tau against the level of load, one line a system."""
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    panels = {
        "tokens/s": "tokens_per_s",
        "to the first token, ms\n(median; dashed: p99)": "first_token_p50_ms",
        "between tokens, ms\n(median; dashed: p99)": "inter_token_p50_ms",
        "tau, tokens a target step": "tau",
    }
    for axis, (label, name) in zip(axes.flat, panels.items(), strict=True):
        for system, levels in curves.items():
            points = [(f.level, getattr(f, name)) for f in levels if getattr(f, name) > 0]
            if not points:
                continue
            (line,) = axis.plot(*zip(*points, strict=True), marker="o", label=system)
            if "p50" in name:
                tail = [(f.level, getattr(f, name.replace("p50", "p99"))) for f in levels]
                axis.plot(*zip(*tail, strict=True), linestyle="--", color=line.get_color(), alpha=0.6)
        axis.set(xlabel=level_name, ylabel=label, xscale="log")
        axis.set_xticks([f.level for f in next(iter(curves.values()))])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_memory(samples: list[MemorySample], settled_s: float, path: Path) -> None:
    """Resident memory of each process over the minutes of a soak, and the part of it that is K/V pages."""
    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    start_s = samples[0].time_s
    minutes = [(sample.time_s - start_s) / 60 for sample in samples]
    axis.plot(minutes, [sample.total for sample in samples], color="black", label="all")
    for name in samples[-1].resident:
        axis.plot(minutes, [sample.resident.get(name, 0.0) for sample in samples], label=name)
    axis.plot(minutes, [sample.pool for sample in samples], linestyle="--", label="K/V pages in use or kept")
    axis.axvline((settled_s - start_s) / 60, color="grey", linewidth=0.8)
    axis.set(xlabel="minutes (grey: end of the warm-up)", ylabel="resident memory, MiB")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
