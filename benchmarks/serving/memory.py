"""What a server and its Python stubs keep in memory while they are under load, and whether that grows."""

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from furcate.builder.engine import Manifest
from furcate.client.server import TritonServer
from serving.checks import gauges

STUB = "triton_python_backend_stub"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """MiB at one time: resident, by process, and of the K/V pages in use or kept for requests to come (a part of that)."""

    time_s: float
    resident: dict[str, float]
    pool: float

    @property
    def total(self) -> float:
        """Resident, all processes."""
        return sum(self.resident.values())


def sample_memory(server: TritonServer, manifest: Manifest) -> MemorySample:
    """One sample of a running server."""
    found = gauges(server)
    pages = found.get("furcate_pages_allocated", 0.0) + found.get("furcate_pages_cached", 0.0)
    return MemorySample(
        time_s=time.monotonic(),
        resident=resident_mib(server),
        pool=pages * manifest.page_size * manifest.kv_bytes_per_token() / 2**20,
    )


def mean_resident(samples: list[MemorySample]) -> dict[str, float]:
    """MiB on average, of each process and of all together."""
    means = {
        name: statistics.mean(sample.resident.get(name, 0.0) for sample in samples) for name in samples[-1].resident
    }
    return {ALL: statistics.mean(sample.total for sample in samples), **means}


def resident_mib(server: TritonServer) -> dict[str, float]:
    """Resident memory of the server and of each model's stub (all processes of its session), in MiB."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            if session != os.getsid(server.pid):
                continue
            name = _name_of((entry / "cmdline").read_bytes().decode(errors="replace").split("\0"))
            pages = int((entry / "statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it ended meanwhile
        found[name] = found.get(name, 0.0) + pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return found


def _name_of(arguments: list[str]) -> str:
    """A stub goes by its model's name: it is started with .../MODEL/1/model.py."""
    if Path(arguments[0]).name != STUB:
        return "tritonserver"
    return next((Path(text).parts[-3] for text in arguments if text.endswith("/1/model.py")), STUB)


def slope_of(times_s: list[float], values: list[float]) -> tuple[float, float]:
    """A line's slope (per hour) through the points, and its standard error."""
    fit = statistics.linear_regression(times_s, values)
    residuals = [v - fit.slope * t - fit.intercept for t, v in zip(times_s, values, strict=True)]
    spread = sum((t - statistics.mean(times_s)) ** 2 for t in times_s)
    error = (sum(r * r for r in residuals) / max(len(values) - 2, 1) / spread) ** 0.5
    return 3600 * fit.slope, 3600 * error
