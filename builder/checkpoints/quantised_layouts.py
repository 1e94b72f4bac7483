"""How fp8 and int4 weights lie in checkpoints. Axes: out rows, in columns."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8, Int32, UInt8
from torch import Tensor

from furcate.builder.errors import CheckpointError
from furcate.builder.network.quantised import QuantisedWeight


def fp8_weight(values: Tensor, scale: Tensor) -> QuantisedWeight:
    """float8_e4m3fn values with one scale for all, or one for each row."""
    return QuantisedWeight(values, scale.float().flatten())


def block_scaled(values: Tensor, scale: Tensor, name: str) -> Float[Tensor, "out in"]:
    """float8_e4m3fn values [out, in] with a scale for each block of rows and columns, in float32.

    Raises CheckpointError unless the blocks cover the weight. modelopt writes them as [out / b, 1, in / b, 1].
    """
    (rows, columns), scale = values.shape, scale.float().squeeze()
    if scale.ndim != 2 or scale.shape[0] > rows or scale.shape[1] > columns:
        raise CheckpointError(
            f"'{name}' is {list(values.shape)} with scales {list(scale.shape)}; a scale a block is expected."
        )
    tall, wide = -(-rows // scale.shape[0]), -(-columns // scale.shape[1])
    spread = scale.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return values.float() * spread


def packed_rows(packed: UInt8[Tensor, "half in"]) -> Int8[Tensor, "out in"]:
    """modelopt's int4: byte [r, c] holds rows 2r (low four bits) and 2r + 1 of column c, in two's complement."""
    low, high = (packed & 15).to(torch.int8), (packed >> 4).to(torch.int8)
    values = torch.stack([low, high], dim=1).flatten(0, 1)
    return torch.where(values > 7, values - 16, values)


def unpacked_columns(packed: Int32[Tensor, "out words"]) -> Int8[Tensor, "out in"]:
    """compressed-tensors' int4: word [r, w] holds columns 8w (lowest bits) to 8w + 7 of row r, each value + 8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (((packed[:, :, None] >> shifts) & 15) - 8).to(torch.int8).flatten(1)
