"""Where a step's time goes: wall seconds per named part, summed.

On a GPU work is asynchronous, so these are the host's times; `benchmarks/gpu_check.py` times the device.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds spent in each named part since the last `reset`. Parts may nest; each counts its own full span."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time inside the with-block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """The sums so far; counting starts again from zero."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds
