"""Programs captured in CUDA graphs: run once for real, recorded, and from then on replayed as one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

NUM_WARM_UPS = 2
"""Runs before the capture: kernels are compiled in the first, and TensorRT settles a context's shapes in it."""
Result = TypeVar("Result")


class Capture(Protocol):
    """Records a program; how, is the device's business."""

    def __call__(
        self, program: Callable[[], Result], warm_up: Callable[[], object]
    ) -> tuple[Callable[[], None], Result]:
        """(a function that runs the program again, its result in tensors that every replay overwrites)."""
        ...


def cuda_capture(program: Callable[[], Result], warm_up: Callable[[], object]) -> tuple[Callable[[], None], Result]:
    """The program as a CUDA graph. `warm_up` runs the same kernels on inputs that may be written to.

    All graphs of a device share one memory pool: they never run side by side, and results are copied out before the next one.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process (a server's) may go on using the GPU meanwhile.
    with torch.cuda.graph(graph, pool=_graph_pool(torch.cuda.current_device()), capture_error_mode="thread_local"):
        result = program()
    return graph.replay, result


@lru_cache
def _graph_pool(device: int) -> Any:
    return torch.cuda.graph_pool_handle()
