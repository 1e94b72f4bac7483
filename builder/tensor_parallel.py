"""Tensor parallelism as data: which part of each weight a rank has (Megatron-LM, arXiv 1909.08053).

qkv and gate_up are divided by output rows (whole heads, and gate and up each), o and down by input columns, whose outputs the
ranks sum. Norms, embedding, lm_head and the head are whole on every rank. Experts are divided as the MLP is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from furcate.builder.engine import Manifest
from furcate.builder.errors import ConfigError
from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.network.spec import DecoderSpec

Weight = Tensor | QuantisedWeight


def check_parallel(manifest: Manifest, num_ranks: int) -> None:
    """Raises ConfigError unless the target's heads and MLP divide among the ranks."""
    spec = manifest.target
    sizes = {"K/V heads": spec.num_kv_heads, "query heads": spec.num_query_heads, "MLP rows": spec.intermediate_size}
    for what, size in sizes.items():
        if size % num_ranks:
            raise ConfigError(f"--tp-size is {num_ranks}; it must divide the target's {size} {what}.")
    if num_ranks > 1 and spec.has_output_bias:
        # The bias would be added once a rank.
        raise ConfigError("--tp-size above 1 is not supported for targets with a bias on the attention's output.")


def rank_spec(spec: DecoderSpec, num_ranks: int) -> DecoderSpec:
    """The decoder as one rank computes it."""
    return replace(
        spec,
        num_query_heads=spec.num_query_heads // num_ranks,
        num_kv_heads=spec.num_kv_heads // num_ranks,
        intermediate_size=spec.intermediate_size // num_ranks,
    )


def rank_weights(spec: DecoderSpec, weights: Mapping[str, Weight], rank: int, num_ranks: int) -> dict[str, Weight]:
    """The named weights of one rank; all of them, unchanged, where there is one rank."""
    if num_ranks == 1:
        return dict(weights)
    return {name: _part(spec, name, weight, rank, num_ranks) for name, weight in weights.items()}


def _part(spec: DecoderSpec, name: str, weight: Weight, rank: int, num_ranks: int) -> Weight:
    module = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
    if module in ("qkv", "gate_up"):
        kv_rows = spec.num_kv_heads * spec.head_dim
        qkv_rows = [spec.num_query_heads * spec.head_dim, kv_rows, kv_rows]

        def own_rows(tensor: Tensor) -> Tensor:
            parts = tensor.split(qkv_rows) if module == "qkv" else tensor.chunk(2)
            return torch.cat([part.chunk(num_ranks)[rank] for part in parts])

        return own_rows(weight) if isinstance(weight, Tensor) else weight.by_rows(own_rows)
    if module in ("o", "down") and len(weight.shape) == 2:
        return _own_columns(weight, rank, num_ranks)
    return weight


def _own_columns(weight: Weight, rank: int, num_ranks: int) -> Weight:
    if not isinstance(weight, Tensor):
        kept = weight.columns_of_rank(rank, num_ranks)
        if kept is not None:
            return kept
        # The ranks' border would cut a block of int4 columns: plain numbers then.
        weight = weight.dequantised()
    return weight.chunk(num_ranks, dim=1)[rank].contiguous()
