"""A weight in fewer bits, as data: what a quantised checkpoint stores and a TensorRT plan may keep.

Axes: out rows, in columns. Only weights are quantised here; activations stay in the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out, in] in fewer bits. weight = values * scales.

    fp8: values float8_e4m3fn [out, in], scales float32 [1] (one for all) or [out].
    int4: values uint8 [out, in / 2], the even column in the low four bits (two's complement); scales [out, in / block].
    """

    values: Tensor
    scales: Tensor

    @property
    def is_int4(self) -> bool:
        """Whether two weights share a byte."""
        return self.values.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the weight it stands for."""
        return self.values.shape[0], self.values.shape[1] * (2 if self.is_int4 else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of values and, in 16 bits as a plan has them, scales."""
        return self.values.nbytes + 2 * self.scales.numel()

    def dequantised(self) -> Tensor:
        """The weight in float32 [out, in], as the layer computes with it."""
        if not self.is_int4:
            scales = self.scales.float()
            return self.values.float() * (scales[:, None] if scales.numel() > 1 else scales)
        low, high = (self.values & 15).to(torch.int8), (self.values >> 4).to(torch.int8)
        signed = torch.stack([low, high], dim=-1).flatten(1)
        signed = torch.where(signed > 7, signed - 16, signed).float()
        block = signed.shape[1] // self.scales.shape[1]
        return signed * self.scales.float().repeat_interleave(block, dim=1)

    def by_rows(self, pick: Callable[[Tensor], Tensor]) -> QuantisedWeight:
        """The rows that `pick` takes of a tensor [out, ...]."""
        return QuantisedWeight(pick(self.values), pick(self.scales) if self.scales.numel() > 1 else self.scales)

    def columns_of_rank(self, rank: int, num_ranks: int) -> QuantisedWeight | None:
        """The rank's equal share of the columns; None where a block of int4 columns would be cut."""
        if self.is_int4 and self.scales.shape[1] % num_ranks:
            return None
        scales = self.scales.chunk(num_ranks, dim=1)[rank] if self.is_int4 else self.scales
        return QuantisedWeight(self.values.chunk(num_ranks, dim=1)[rank].contiguous(), scales.contiguous())


def stacked(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Weights one below the other (q, k, v as one); None where they are of different formats."""
    if len({(weight.is_int4, weight.shape[1], weight.scales.shape[1:]) for weight in weights}) > 1:
        return None
    scales = [
        weight.scales.expand(weight.shape[0]) if not weight.is_int4 and len(weights) > 1 else weight.scales
        for weight in weights
    ]
    return QuantisedWeight(torch.cat([weight.values for weight in weights]), torch.cat(scales))


def packed_int4(values: Tensor) -> Tensor:
    """uint8 [out, in / 2] of int8 values [out, in] between -8 and 7: the even column in the low four bits."""
    nibbles = (values & 15).to(torch.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
