"""The machine that a benchmark runs on, as its record names it: what processor, and how busy before."""

import os
import time
from pathlib import Path

from furcate.builder.engine import Engine

BUSY = 0.1
"""A larger share of the cores at work before a benchmark says that other programs were running."""


def host() -> dict[str, object]:
    """For the record of a benchmark that is about to start. Takes two seconds."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(names)) or "unknown",
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "busy_before": round(busy_share(), 3),
    }


def busy_share(seconds: float = 2.0) -> float:
    """The share of all cores' time that was not idle, from now on for so long."""
    first = _ticks()
    time.sleep(seconds)
    spent = [after - before for before, after in zip(first, _ticks(), strict=True)]
    idle = spent[3] + spent[4]  # idle, and waiting for a disk
    return 1 - idle / max(sum(spent), 1)


def _ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def check_fixed_budget(engine: Engine) -> None:
    """Ends the program when steps of two runs of this engine may draft different trees, so that their times say nothing."""
    if engine.manifest.is_adaptive:
        raise SystemExit(
            f"{engine.path} drafts by this machine's pass times; build one with --no-adaptive to compare steps."
        )
