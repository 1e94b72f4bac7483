"""The memory of K/V pools.

On a CPU it is taken page by page as requests come, which spares a short run what it does not need; a server takes all of it at
its start, so that it cannot run short of it later.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from furcate.builder.errors import EngineMismatch


def new_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool of zeros. Raises EngineMismatch when the device does not give so much memory."""
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy's zeros come from calloc: no page is taken before it is written.
        storage = np.zeros(shape, dtype=np.float32 if dtype is torch.float32 else np.int16)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _does_not_fit(math.prod(shape) * dtype.itemsize, "more than this machine gives") from error
    return torch.from_numpy(storage).view(dtype)


def take_pool_memory(*pools: Tensor | None) -> None:
    """Writes to every page of these new K/V pools; None, and what lies on a GPU, is passed over.

    Raises EngineMismatch when the machine has not so much left.
    """
    on_cpu = [pool for pool in pools if pool is not None and pool.device.type == "cpu"]
    check_fits(on_cpu, available_bytes())
    for pool in on_cpu:
        pool.zero_()


def check_fits(pools: Sequence[Tensor], available: int) -> None:
    """Raises EngineMismatch when pools to which nothing was written yet take more than `available` bytes."""
    wanted = sum(pool.nbytes for pool in pools)
    if wanted > available:
        raise _does_not_fit(wanted, f"and this machine has {available / 2**30:.2f} GiB left")


def _does_not_fit(num_bytes: int, why: str) -> EngineMismatch:
    return EngineMismatch(
        f"the engine's K/V pool takes {num_bytes / 2**30:.2f} GiB of memory, {why};"
        " free some, or build the engine with a smaller --max-pool-tokens."
    )


def available_bytes() -> int:
    """The memory that Linux can give without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
