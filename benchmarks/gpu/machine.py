"""The machine that gpu_check runs on: how it times a call, and furcate importable from a plain checkout.

On a GPU a call is captured in a CUDA graph and replayed behind a flushed L2 cache. With --toy the same code runs in
triton's interpreter on the CPU, where its times mean nothing and are marked so.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FLUSH_BYTES = 256 << 20
"""More than the L2 cache of any chip here (H200 50 MB, B200 126 MB)."""
REPEATS = 20


def import_furcate() -> None:
    """Make `furcate.plugins` importable where only torch and triton are installed: from the checkout's folders."""
    if importlib.util.find_spec("furcate") is not None:
        return
    sys.modules["furcate"] = package = types.ModuleType("furcate")
    package.__path__ = []
    for name in ("builder", "plugins"):
        folder = ROOT / name
        spec = importlib.util.spec_from_file_location(
            f"furcate.{name}", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class Machine:
    """The device, its deadline, and its clock."""

    def __init__(self, is_toy: bool, minutes: float):
        self.is_toy = is_toy
        self.device = "cpu" if is_toy else "cuda"
        self.deadline = time.monotonic() + 60 * minutes
        if not is_toy:
            self.flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def describe(self) -> dict:
        """Names and versions that belong to a result."""
        import triton

        facts = {"torch": torch.__version__, "triton": triton.__version__, "is_toy": self.is_toy}
        if self.is_toy:
            return facts | {"gpu": "none: interpreter on the CPU"}
        properties = torch.cuda.get_device_properties(0)
        return facts | {
            "gpu": properties.name,
            "arch": properties.major * 10 + properties.minor,
            "num_sms": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }

    def time_us(self, call: Callable[[], object]) -> float:
        """Median time of the call in microseconds, its memory not in the L2 cache."""
        if self.is_toy:
            start = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - start)
        graph = self.capture(call)
        return self.replay_us(graph)

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The call as a CUDA graph, after two runs that compile its kernels."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Median time of a replay in microseconds."""
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush_buffer.zero_()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        return statistics.median(times)

    def copy_terabytes_per_second(self) -> float:
        """Bytes read and written by a plain copy, over its time: what this memory can do."""
        num_bytes = 1 << 20 if self.is_toy else 2 << 30
        source = torch.empty(num_bytes, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.time_us(lambda: target.copy_(source)) / 1e6

    def matmul_teraflops(self) -> float:
        """bf16 rate of a large matrix product: what these tensor cores do."""
        size, dtype = (64, torch.float32) if self.is_toy else (8192, torch.bfloat16)
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return 2 * size**3 / self.time_us(lambda: a @ b) / 1e6
