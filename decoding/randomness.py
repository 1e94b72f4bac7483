"""Random numbers that depend on nothing but (seed, position, draw).

B batch rows, N nodes. A counter-based generator (the mixing function of SplitMix64) has no state to advance, so a row's
numbers are the same in any batch, in any order, and after a restart.
"""

from enum import IntEnum

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014): increment and multipliers, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_DRAW_STRIDE = 0xD1342543DE82EF95 - 2**64
_MANTISSA = 2**53 - 1
_LARGEST = 1 - 2**-24
"""The largest float32 below 1."""


class Draw(IntEnum):
    """What a number decides. Two decisions at one position never share a number."""

    TOKEN = 0
    """The target's own token at a position: plain sampling, and every choice that must equal it."""
    ACCEPT = 1
    DRAFT = 2


def uniforms(
    seeds: Int64[Tensor, " B"], positions: Int64[Tensor, "B ..."], draw: int | Int64[Tensor, "..."]
) -> Float64[Tensor, "B ..."]:
    """Numbers uniform in [0, 1), strictly below 1 also after a cast to float32.

    `positions` holds, per number, the index in the text that it decides about. `draw` separates the numbers of one
    position: a constant, or a tensor that broadcasts against `positions`.
    """
    bits = _bits(seeds, positions, draw)
    return (((bits >> 11) & _MANTISSA).double() * 2.0**-53).clamp_(max=_LARGEST)


def node_uniforms(
    seeds: Int64[Tensor, " B"], positions: Int64[Tensor, " B"], num_nodes: int, draw: Draw
) -> Float64[Tensor, "B N"]:
    """One number per tree node, keyed by the position of the root, the node's index, and `draw`."""
    return uniforms(seeds, positions[:, None].expand(-1, num_nodes), _node_draws(num_nodes, draw, seeds.device))


def node_seeds(
    seeds: Int64[Tensor, " B"], positions: Int64[Tensor, " B"], num_nodes: int, draw: Draw
) -> Int64[Tensor, "B N"]:
    """One seed per tree node, for a decision that needs many numbers; keyed as `node_uniforms`."""
    return _bits(seeds, positions[:, None].expand(-1, num_nodes), _node_draws(num_nodes, draw, seeds.device))


def _node_draws(num_nodes: int, draw: Draw, device: torch.device) -> Int64[Tensor, " N"]:
    return torch.arange(num_nodes, device=device) * len(Draw) + int(draw)


def _bits(
    seeds: Int64[Tensor, " B"], positions: Int64[Tensor, "B ..."], draw: int | Int64[Tensor, "..."]
) -> Int64[Tensor, "B ..."]:
    keys = _mix(seeds * _GOLDEN + _GOLDEN).reshape(-1, *(1,) * (positions.dim() - 1))
    return _mix(keys + positions * _GOLDEN + (draw + 1) * _DRAW_STRIDE)


def _mix(x: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """SplitMix64's finaliser. Integer products wrap; `>>` is arithmetic, so its copies of the sign are masked off."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    return x ^ ((x >> 31) & (2**33 - 1))
