"""Numbers that a step needs on its device, copied there once: a copy from the host cannot be captured in a CUDA graph."""

from functools import lru_cache

import torch
from torch import Tensor

Numbers = tuple["int | Numbers", ...]


@lru_cache(maxsize=4096)
def device_constant(numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`numbers` (nested tuples are rows) as a tensor. It is shared by all who ask: do not write to it."""
    return torch.tensor(numbers, dtype=dtype, device=device)
