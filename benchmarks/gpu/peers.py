"""(d) What others would use for the same attention, in the same run. K/V lies contiguous for them, and rotation and
storing are not counted against them.

B sequences, N nodes, G query heads per KV head, S = prefix + N keys, D head_dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpu.problems import Problem

SERIAL = "serial prefix (stand-in for SGLang's and vLLM's scheme)"


def contiguous(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, Hq, N, D] and random k, v [B, Hkv, S, D] of the problem's sizes."""
    shape, spec = problem.shape, problem.spec
    q = problem.inputs.qkv[:, :, : spec.num_query_heads * spec.head_dim]
    q = q.view(shape.batch, shape.nodes, spec.num_query_heads, spec.head_dim).transpose(1, 2).contiguous()
    size = (shape.batch, spec.num_kv_heads, shape.prefix + shape.nodes, spec.head_dim)
    k, v = (torch.empty(size, dtype=q.dtype, device=q.device).normal_() for _ in range(2))
    return q, k, v


def sdpa(problem: Problem) -> Callable[[], torch.Tensor]:
    """torch's attention with a dense mask, the group's heads folded into rows so that K/V is read once."""
    shape, spec = problem.shape, problem.spec
    q, k, v = contiguous(problem)
    q = q.view(shape.batch, spec.num_kv_heads, spec.group_size * shape.nodes, spec.head_dim)
    prefix = torch.ones(shape.nodes, shape.prefix, dtype=torch.bool, device=q.device)
    mask = torch.cat([prefix, problem.is_ancestor], dim=1).repeat(spec.group_size, 1).expand(shape.batch, 1, -1, -1)
    return lambda: F.scaled_dot_product_attention(q, k, v, mask)


def flex(problem: Problem) -> Callable[[], torch.Tensor]:
    """FlexAttention with the ancestor test as its mask_mod; compiled on a GPU."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    shape = problem.shape
    q, k, v = contiguous(problem)
    is_ancestor = problem.is_ancestor

    def attends(b, h, i, j):
        # Blocks reach behind the last key and node; what they read there is discarded, but must be in bounds.
        column = (j - shape.prefix).clamp(0, shape.nodes - 1)
        return (j < shape.prefix) | is_ancestor[i.clamp(max=shape.nodes - 1), column]

    blocks = module.create_block_mask(attends, None, None, shape.nodes, k.shape[2], device=q.device.type)
    attention = torch.compile(module.flex_attention) if q.is_cuda else module.flex_attention
    return lambda: attention(q, k, v, block_mask=blocks, enable_gqa=True)


def flashinfer(problem: Problem) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged prefill with a custom mask; ImportError where it is not installed."""
    module = importlib.import_module("flashinfer")
    shape, spec, batch, inputs = problem.shape, problem.spec, problem.batch, problem.inputs
    device, pages = inputs.qkv.device, batch.page_table.shape[1]
    rows = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    last = (shape.prefix + shape.nodes - 1) % shape.page_size + 1
    prefix = torch.ones(shape.nodes, shape.prefix, dtype=torch.bool, device=device)
    mask = torch.cat([prefix, problem.is_ancestor], dim=1).flatten().repeat(shape.batch)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        rows * shape.nodes, rows * pages, batch.page_table.flatten(),
        torch.full((shape.batch,), last, dtype=torch.int32, device=device),
        spec.num_query_heads, spec.num_kv_heads, spec.head_dim, shape.page_size, custom_mask=mask,
        q_data_type=inputs.qkv.dtype,
    )  # fmt: skip
    q = contiguous(problem)[0].transpose(1, 2).reshape(-1, spec.num_query_heads, spec.head_dim)
    return lambda: wrapper.run(q, inputs.pool)


def serial_prefix(problem: Problem) -> Callable[[], torch.Tensor]:
    """Our kernel in the scheme of others: one program walks the prefix of a (sequence, query head) alone."""
    launch = problem.launch(num_splits=1, is_packed=False)
    return lambda: problem.run(launch)


PEERS = {"SDPA, dense mask": sdpa, "FlexAttention": flex, "FlashInfer": flashinfer, SERIAL: serial_prefix}
