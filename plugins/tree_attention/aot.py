"""The attention kernels as ahead-of-time sources: what they are compiled with for an engine or a report."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from furcate.plugins.aot import KernelSource
from furcate.plugins.specification import TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT
from furcate.plugins.tree_attention.kernel import tree_attention_reduce, tree_attention_split
from furcate.plugins.tree_attention.launch import kernel_constants
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import Tactic

ACTIVATIONS = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
REDUCE_WARPS = 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The choices beside spec and tactic that make another kernel."""

    activation: str = "bf16"
    page_size: int = 64
    has_fp8_pages: bool = False
    has_norms: bool = False
    is_chain: bool = False
    has_offset: bool = False
    """Tree nodes of earlier calls lie in the pages; never in a TensorRT engine."""
    is_single: bool = False
    """One split, which writes the result itself; never in a TensorRT engine."""


def split_source(spec: AttentionSpec, tactic: Tactic, variant: Variant) -> KernelSource:
    """The attention kernel, its pool reached by address."""
    constants = kernel_constants(spec, tactic, variant.page_size) | {
        "KV_DTYPE": tl.float8e4nv if variant.has_fp8_pages else ACTIVATIONS[variant.activation],
        "HAS_NORMS": variant.has_norms,
        "IS_RAGGED": True,
        "IS_CHAIN": variant.is_chain,
        "HAS_OFFSET": variant.has_offset,
        "IS_SINGLE": variant.is_single,
        "IS_FUSED": True,
        "IS_PACKED": True,
    }
    signature = TREE_ATTENTION_SPLIT.signature(variant.activation)
    if variant.is_single:
        signature["partial_out_ptr"] = f"*{variant.activation}"
    return KernelSource(
        kernel=tree_attention_split,
        signature=signature,
        constants=constants,
        num_warps=tactic.num_warps,
        max_registers=tactic.max_registers,
    )


def reduce_source(spec: AttentionSpec, activation: str, num_splits: int) -> KernelSource:
    """The kernel that weighs the partial results of up to the next power of two of `num_splits` splits."""
    constants = {
        "HQ": spec.num_query_heads,
        "HKV": spec.num_kv_heads,
        "D": spec.head_dim,
        "DP": triton.next_power_of_2(spec.head_dim),
        "PACK": spec.group_size,
        "BLOCK_S": triton.next_power_of_2(num_splits),
    }
    signature = TREE_ATTENTION_REDUCE.signature(activation)
    return KernelSource(kernel=tree_attention_reduce, signature=signature, constants=constants, num_warps=REDUCE_WARPS)
