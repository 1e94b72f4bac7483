"""(e) The ablation in which rotation and storing are a kernel of their own, as elsewhere.

d head_dim; a program handles one head of one node.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from gpu.problems import Problem


@triton.jit
def rotate_and_store(
    qkv_ptr, out_ptr, positions_ptr, page_table_ptr, cache_lengths_ptr, cos_ptr, sin_ptr, pool_ptr,
    num_nodes, num_pages,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (N, B, Hq + 2 Hkv): rotate q and k into `out`, store k and v in the pages."""
    node, b, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    row = ((b * num_nodes + node) * (HQ + 2 * HKV) + head) * D
    x = tl.load(qkv_ptr + row + d)
    if head < HQ + HKV:
        angle = tl.load(positions_ptr + b * num_nodes + node) * (D // 2) + d % (D // 2)
        y = tl.load(qkv_ptr + row + (d + D // 2) % D).to(tl.float32)
        sin = tl.load(sin_ptr + angle)
        turned = x.to(tl.float32) * tl.load(cos_ptr + angle) + y * tl.where(d < D // 2, -sin, sin)
        x = turned.to(x.dtype)
    tl.store(out_ptr + row + d, x)
    if head >= HQ:
        slot = tl.load(cache_lengths_ptr + b) + node
        page = tl.load(page_table_ptr + b * num_pages + slot // PAGE).to(tl.int64)
        half, kv_head = (head - HQ) // HKV, (head - HQ) % HKV
        tl.store(pool_ptr + ((page * 2 + half) * PAGE + slot % PAGE) * (HKV * D) + kv_head * D + d, x)


def run_unfused(problem: Problem, rotated: torch.Tensor) -> torch.Tensor:
    """The same result by two kernels; `rotated` is a buffer of qkv's shape."""
    inputs, batch, spec = problem.inputs, problem.batch, problem.spec
    num_rows, num_nodes = batch.positions.shape
    heads = spec.num_query_heads + 2 * spec.num_kv_heads
    rotate_and_store[(num_nodes, num_rows, heads)](
        inputs.qkv, rotated, batch.positions, batch.page_table, batch.cache_lengths, problem.rope.cos,
        problem.rope.sin, inputs.pool, num_nodes, batch.page_table.shape[1],
        HQ=spec.num_query_heads, HKV=spec.num_kv_heads, D=spec.head_dim, PAGE=inputs.page_size, num_warps=1,
    )  # fmt: skip
    return replace(problem, inputs=replace(inputs, qkv=rotated)).run(problem.launch(is_fused=False))
