"""`furcate::tree_attention` as a torch operator: SDPA with the expanded mask on the CPU, the fused kernel on a GPU.

On a GPU a call reads nothing back to the host, so a step made of such calls can be captured in a CUDA graph.

B batch, N nodes, W mask words, P pages of a sequence, H heads (q query, kv key/value), D head_dim.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from furcate.builder.errors import ConfigError
from furcate.plugins.chips import closest_chip
from furcate.plugins.tree_attention import cpu
from furcate.plugins.tree_attention.spec import AttentionSpec, HeadNorms, RopeTable, TreeBatch
from furcate.plugins.tree_attention.tactics import choose_splits, choose_tactic

if TYPE_CHECKING:
    from jaxtyping import Float, Float32
    from torch import Tensor

FIRST_FP8_ARCH = 89
"""The oldest architecture that converts e4m3."""
SCHEMA = (
    "(Tensor qkv, Tensor(a!) pool_layer, Tensor positions, Tensor? tree_mask, Tensor? num_nodes, Tensor cache_lengths,"
    " Tensor page_table, Tensor rope_cos, Tensor rope_sin, Tensor? query_norm, Tensor? key_norm, Tensor? kv_scales,"
    " int node_offset, bool is_chain, int num_query_heads, int num_kv_heads, float? scale, float? softcap,"
    " int? sliding_window, float norm_eps) -> Tensor"
)


def tree_attention(
    layer: tuple[Float[Tensor, "B N (Hq+2Hkv)*D"], Float[Tensor, "pages 2 page_size Hkv D"]],
    batch: TreeBatch,
    model: tuple[AttentionSpec, RopeTable],
    norms: HeadNorms | None = None,
    kv_scales: Float32[Tensor, " 2"] | None = None,
) -> Float[Tensor, "B N Hq*D"]:
    """The attention of every node of `layer` = (qkv, pool_layer); the pool's layer is written in place.

    Raises ConfigError where the device, or the kernel language on it, cannot run the call.
    """
    (qkv, pool_layer), (spec, rope) = layer, model
    return torch.ops.furcate.tree_attention(
        qkv, pool_layer, batch.positions, batch.tree_mask, batch.num_nodes, batch.cache_lengths, batch.page_table,
        rope.cos, rope.sin, norms and norms.query, norms and norms.key, kv_scales,
        batch.node_offset, batch.is_chain, spec.num_query_heads, spec.num_kv_heads, spec.scale, spec.softcap,
        spec.sliding_window, spec.norm_eps,
    )  # fmt: skip


@dataclass(frozen=True)
class KernelPlan:
    """One pass on a GPU: the kernel takes its inputs as they are."""

    batch: TreeBatch
    spec: AttentionSpec
    rope: RopeTable


def plan_attention(
    batch: TreeBatch, spec: AttentionSpec, rope: RopeTable, pool: Float[Tensor, "... pages 2 page_size Hkv D"]
) -> KernelPlan | cpu.AttentionPlan:
    """The plan of one forward pass over `pool`, for the device it lies on; see cpu.plan_attention."""
    return KernelPlan(batch, spec, rope) if pool.is_cuda else cpu.plan_attention(batch, spec, rope, pool)


def attend(
    qkv: Float[Tensor, "B N (Hq+2Hkv)*D"],
    pool_layer: Float[Tensor, "pages 2 page_size Hkv D"],
    plan: KernelPlan | cpu.AttentionPlan,
    norms: HeadNorms | None = None,
) -> Float[Tensor, "B N Hq*D"]:
    """The attention of every node of one layer, by the plan of its pass; the pool's layer is written in place."""
    if isinstance(plan, KernelPlan):
        return tree_attention((qkv, pool_layer), plan.batch, (plan.spec, plan.rope), norms)
    return cpu.tree_attention(qkv, pool_layer, plan, norms)


def _unpacked(arguments: tuple) -> tuple[TreeBatch, AttentionSpec, RopeTable, HeadNorms | None]:
    """The operator's flat arguments as the objects that both implementations take."""
    (qkv, _, positions, tree_mask, num_nodes, cache_lengths, page_table, cos, sin, query_norm, key_norm, _,
     node_offset, is_chain, num_query_heads, num_kv_heads, scale, softcap, sliding_window, norm_eps) = arguments  # fmt: skip
    batch = TreeBatch(
        positions=positions,
        tree_mask=tree_mask,
        cache_lengths=cache_lengths,
        page_table=page_table,
        node_offset=node_offset,
        num_nodes=num_nodes,
        is_chain=is_chain,
    )
    spec = AttentionSpec(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=qkv.shape[-1] // (num_query_heads + 2 * num_kv_heads),
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        norm_eps=norm_eps,
    )
    norms = None if query_norm is None else HeadNorms(query_norm, key_norm)
    return batch, spec, RopeTable(cos, sin), norms


def _on_cpu(*arguments) -> Tensor:
    batch, spec, rope, norms = _unpacked(arguments)
    qkv, pool_layer = arguments[:2]
    return cpu.tree_attention(qkv, pool_layer, cpu.plan_attention(batch, spec, rope, pool_layer), norms)


def _on_cuda(*arguments) -> Tensor:
    batch, spec, rope, norms = _unpacked(arguments)
    qkv, pool_layer, kv_scales = arguments[0], arguments[1], arguments[11]
    launch = _kernel_module()
    arch, _ = _device(qkv.device.index or 0)
    if pool_layer.element_size() == 1 and (arch < FIRST_FP8_ARCH or kv_scales is None):
        raise ConfigError(
            f"The pool is {pool_layer.dtype}, the GPU sm_{arch}, kv_scales {'given' if kv_scales is not None else 'None'}; "
            f"fp8 pages need kv_scales and sm_{FIRST_FP8_ARCH} or newer."
        )
    inputs = launch.LayerInputs(
        qkv=qkv,
        pool=pool_layer,
        page_size=pool_layer.shape[2],
        kv_dtype=pool_layer.dtype,
        norms=norms,
        kv_scales=kv_scales,
    )
    return launch.launch_tree_attention(inputs, batch, spec, rope, launch_for(inputs, batch, spec))


def launch_for(inputs, batch: TreeBatch, spec: AttentionSpec):
    """Tactic and splits of a call on its device, from shapes alone."""
    arch, num_sms = _device(inputs.qkv.device.index or 0)
    num_rows, num_nodes = batch.positions.shape
    rows = num_nodes * spec.group_size
    tactic = choose_tactic(arch, rows, spec.head_dim, inputs.qkv.element_size())
    num_ctas = num_rows * spec.num_kv_heads * -(-rows // tactic.block_m)
    num_keys = batch.page_table.shape[1] * inputs.page_size
    splits = choose_splits(num_ctas, num_sms * tactic.ctas_per_sm, num_keys, tactic)
    return _kernel_module().Launch(tactic=tactic, num_splits=splits)


@functools.cache
def _device(index: int) -> tuple[int, int]:
    """Known architecture at or below the device's, and its SMs."""
    properties = torch.cuda.get_device_properties(index)
    return closest_chip(properties.major * 10 + properties.minor).arch, properties.multi_processor_count


@functools.cache
def _kernel_module():
    """launch.py, imported at the first call on a GPU: the kernel language is not needed elsewhere."""
    try:
        return importlib.import_module("furcate.plugins.tree_attention.launch")
    except ModuleNotFoundError as error:
        raise ConfigError(f"Running on a GPU needs {error.name}: pip install 'furcate[gpu]'.") from error


_operator = torch.library.custom_op(
    "furcate::tree_attention", _on_cpu, mutates_args=("pool_layer",), device_types="cpu", schema=SCHEMA
)
_operator.register_kernel("cuda", _on_cuda)


@_operator.register_fake
def _shape(qkv, *arguments):
    num_query_heads, num_kv_heads = arguments[13], arguments[14]
    head_dim = qkv.shape[-1] // (num_query_heads + 2 * num_kv_heads)
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], num_query_heads * head_dim)
