"""The networks of an engine, emitted: target, head, and the head's fusion of features.

Axes: B batch, N nodes, W mask words, R rows asked for, F feature width, H hidden, V vocabulary, Vd draft vocabulary, L layers.
Inputs of the target: token_ids [B,N], positions [B,N], tree_mask [B,N,W], cache_lengths [B], logit_rows [B,R] (all int32), then
what the attention form adds: paged (plugin) num_nodes [B], page_table [B,P] int32 and kv_pool [L] int64; native k_cache.* and
v_cache.* [B,Hkv,S,D]. Outputs: logits [B,R,V] float32, features [B,N,F].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from furcate.builder.network.decoder import run_target
from furcate.builder.network.heads import (
    eagle_fuse,
    eagle_layer,
    eagle_logits,
    hydra_logits,
    hydra_prefix,
    medusa_logits,
)
from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.network.spec import DecoderSpec, HeadKind, HeadSpec
from furcate.builder.ops.tensorrt import AttentionForm, EmissionSettings, TensorRTOps
from furcate.builder.ops.tensorrt_graph import Graph
from furcate.builder.ops.tensorrt_native import NativeAttention
from furcate.builder.ops.tensorrt_plugin import PluginAttention, PluginSettings
from furcate.builder.ops.tensorrt_versions import TensorRT
from furcate.builder.ops.tensorrt_weights import NamedWeights
from furcate.builder.ops.torch import RopeTables

Weights = Mapping[str, Tensor | QuantisedWeight]
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class NativeSettings:
    """Native attention: `num_slots` tokens of K/V cache a sequence, tree included."""

    num_slots: int


@dataclass(frozen=True, kw_only=True)
class EmissionContext:
    """What all networks of an engine share. `shared_tables` [rows, H] are read from inputs by every network that needs them."""

    tensorrt: TensorRT
    dtype: torch.dtype
    attention: NativeSettings | PluginSettings
    rope: RopeTables
    num_ranks: int = 1
    shared_tables: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class EmittedNetwork:
    """A network ready to be built. `graph` owns the memory of its constants: keep it until the plan exists."""

    name: str
    network: Any
    graph: Graph


def emit_target(
    builder: Any, context: EmissionContext, spec: DecoderSpec, weights: Weights, taps: tuple[int, ...]
) -> EmittedNetwork:
    """The target: logits of the rows asked for, and the features of `taps` where a head wants them."""
    graph = _graph(builder, context)
    inputs = _pass_inputs(graph, context)
    logit_rows = graph.input("logit_rows", torch.int32, (-1, -1))
    aliases = {LM_HEAD: EMBEDDING} if spec.is_tied else {}
    shared = _shared_inputs(graph, context, tuple(context.shared_tables))
    named = NamedWeights(graph, weights, shared, aliases)
    ops = TensorRTOps(graph, named, _settings(graph, context, spec.num_layers, spec.has_unit_offset_norm))
    outputs = run_target(ops, spec, inputs, taps, logit_rows)
    graph.mark_output(graph.cast(outputs.logits, torch.float32), "logits")
    if outputs.features is not None:
        graph.mark_output(outputs.features, "features")
    return EmittedNetwork("target", graph.network, graph)


def emit_head(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights) -> list[EmittedNetwork]:
    """The head's networks: Medusa's `head`; EAGLE's `head` (its layer) and `logits`; EAGLE-3's `fuse` of features too.

    Hydra's `logits.<depth>`, and `head`, a prefix layer; a draft model's `head`.
    """
    if head.kind is HeadKind.MEDUSA:
        return [_emit_medusa(builder, context, head, weights)]
    if head.kind is HeadKind.HYDRA:
        prefix = [_emit_hydra_prefix(builder, context, head, weights)] if head.has_prefix_layer else []
        return prefix + [_emit_hydra(builder, context, head, weights, depth) for depth in range(head.num_heads)]
    if head.kind is HeadKind.MODEL:
        assert head.decoder is not None
        whole = emit_target(builder, replace(context, shared_tables={}, num_ranks=1), head.decoder, weights, ())
        return [replace(whole, name="head")]
    networks = [_emit_layer(builder, context, head, weights), _emit_logits(builder, context, head, weights)]
    if head.kind is HeadKind.EAGLE3:
        networks.append(_emit_fuse(builder, context, head, weights))
    return networks


def _emit_layer(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights) -> EmittedNetwork:
    """hidden [B,N,H] and token_ids -> next_hidden [B,N,H]; the head's own K/V cache."""
    assert head.decoder is not None
    graph = _graph(builder, context)
    hidden = graph.input("hidden", context.dtype, (-1, -1, head.hidden_size))
    inputs = _pass_inputs(graph, context, has_node_offset=isinstance(context.attention, NativeSettings))
    named = _head_weights(graph, context, weights, [] if head.owns_embedding else [EMBEDDING])
    ops = TensorRTOps(graph, named, _settings(graph, context, 1, head.decoder.has_unit_offset_norm, num_ranks=1))
    embedding = ops.embedding("embed_tokens", inputs.token_ids)
    graph.mark_output(eagle_layer(ops, head, hidden, embedding, inputs), "next_hidden")
    return EmittedNetwork("head", graph.network, graph)


def _emit_logits(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights) -> EmittedNetwork:
    """hidden [B,N,H] -> logits [B,N,Vd] float32. A plan of its own: a step starts from the hidden state of the last one."""
    graph = _graph(builder, context)
    hidden = graph.input("hidden", context.dtype, (-1, -1, head.hidden_size))
    named = _head_weights(graph, context, weights, [] if LM_HEAD in weights else [LM_HEAD])
    ops = TensorRTOps(graph, named, EmissionSettings(attention=None))
    graph.mark_output(graph.cast(eagle_logits(ops, head, hidden), torch.float32), "logits")
    return EmittedNetwork("logits", graph.network, graph)


def _emit_fuse(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights) -> EmittedNetwork:
    """features [B,N,F] -> hidden [B,N,H]."""
    graph = _graph(builder, context)
    width = head.target_hidden_size * len(head.feature_layers)
    features = graph.input("features", context.dtype, (-1, -1, width))
    ops = TensorRTOps(graph, NamedWeights(graph, weights), EmissionSettings(attention=None))
    graph.mark_output(eagle_fuse(ops, head, features), "hidden")
    return EmittedNetwork("fuse", graph.network, graph)


def _emit_medusa(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights) -> EmittedNetwork:
    """hidden [B,N,H] -> logits.<i> [B,N,Vd] float32 of every head."""
    graph = _graph(builder, context)
    hidden = graph.input("hidden", context.dtype, (-1, -1, head.hidden_size))
    needs_table = not head.owns_lm_head and LM_HEAD not in weights
    named = _head_weights(graph, context, weights, [LM_HEAD] if needs_table else [])
    ops = TensorRTOps(graph, named, EmissionSettings(attention=None))
    for i, logits in enumerate(medusa_logits(ops, head, hidden)):
        graph.mark_output(graph.cast(logits, torch.float32), f"logits.{i}")
    return EmittedNetwork("head", graph.network, graph)


def _emit_hydra_prefix(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights) -> EmittedNetwork:
    """hidden [B,N,H] -> next_hidden [B,N,H], what Hydra's heads read; the head's own K/V cache."""
    assert head.decoder is not None
    graph = _graph(builder, context)
    hidden = graph.input("hidden", context.dtype, (-1, -1, head.hidden_size))
    inputs = _pass_inputs(graph, context, isinstance(context.attention, NativeSettings), reads_tokens=False)
    settings = _settings(graph, context, 1, head.decoder.has_unit_offset_norm, num_ranks=1)
    ops = TensorRTOps(graph, NamedWeights(graph, weights), settings)
    graph.mark_output(hydra_prefix(ops, head, hidden, inputs), "next_hidden")
    return EmittedNetwork("head", graph.network, graph)


def _emit_hydra(builder: Any, context: EmissionContext, head: HeadSpec, weights: Weights, depth: int) -> EmittedNetwork:
    """path [B,N,H (depth + 2)] (ungrounded: [B,N,H]) -> logits [B,N,Vd] float32 of the head for nodes at `depth`."""
    graph = _graph(builder, context)
    width = head.hidden_size * (depth + 2 if head.is_grounded else 1)
    path = graph.input("path", context.dtype, (-1, -1, width))
    ops = TensorRTOps(graph, NamedWeights(graph, weights), EmissionSettings(attention=None))
    graph.mark_output(graph.cast(hydra_logits(ops, head, depth, path), torch.float32), "logits")
    return EmittedNetwork(f"logits.{depth}", graph.network, graph)


def _graph(builder: Any, context: EmissionContext) -> Graph:
    return Graph(context.tensorrt, context.tensorrt.create_network(builder), context.dtype)


def _settings(
    graph: Graph, context: EmissionContext, num_layers: int, has_unit_offset_norm: bool, num_ranks: int | None = None
) -> EmissionSettings:
    attention: AttentionForm
    if isinstance(context.attention, NativeSettings):
        attention = NativeAttention(graph, context.rope, context.attention.num_slots)
    else:
        attention = PluginAttention(graph, context.rope, context.attention, num_layers)
    return EmissionSettings(
        attention=attention,
        num_ranks=context.num_ranks if num_ranks is None else num_ranks,
        has_unit_offset_norm=has_unit_offset_norm,
    )


def _pass_inputs(
    graph: Graph, context: EmissionContext, has_node_offset: bool = False, reads_tokens: bool = True
) -> PassInputs:
    is_paged = isinstance(context.attention, PluginSettings)
    return PassInputs(
        token_ids=graph.input("token_ids", torch.int32, (-1, -1)) if reads_tokens else None,
        positions=graph.input("positions", torch.int32, (-1, -1)),
        tree_mask=graph.input("tree_mask", torch.int32, (-1, -1, -1)),
        cache_lengths=graph.input("cache_lengths", torch.int32, (-1,)),
        page_table=graph.input("page_table", torch.int32, (-1, -1)) if is_paged else None,
        num_nodes=graph.input("num_nodes", torch.int32, (-1,)) if is_paged else None,
        node_offset=graph.input("node_offset", torch.int32, (1,)) if has_node_offset else 0,  # type: ignore[arg-type]
    )


def _head_weights(graph: Graph, context: EmissionContext, weights: Weights, borrowed: list[str]) -> NamedWeights:
    """The head's weights with the target's tables it borrows; a tied target's projection is its embedding."""
    aliases = {} if LM_HEAD in context.shared_tables or LM_HEAD not in borrowed else {LM_HEAD: EMBEDDING}
    names = sorted({aliases.get(name, name) for name in borrowed})
    return NamedWeights(graph, weights, _shared_inputs(graph, context, tuple(names)), aliases)


def _shared_inputs(graph: Graph, context: EmissionContext, names: tuple[str, ...]) -> dict[str, Any]:
    """Tables that several plans read from one buffer, as inputs named as the weights are."""
    missing = [name for name in names if name not in context.shared_tables]
    assert not missing, f"{missing} are borrowed from the target, so they must be shared tables"
    return {name: graph.input(name, context.dtype, context.shared_tables[name]) for name in names}
