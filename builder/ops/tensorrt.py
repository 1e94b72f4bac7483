"""Emits a network into a TensorRT INetworkDefinition: the same calls that `ops/torch.py` runs.

Axes: B batch, N nodes, H hidden, V vocabulary, E experts. Activations are [B,N,width], B and N dynamic.
Softmax, norms and rotation are computed in float32, as on the CPU; everything else in the engine's dtype (strongly typed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from furcate.builder.network.inputs import Array, PassInputs
from furcate.builder.network.spec import Activation, DecoderSpec
from furcate.builder.ops.tensorrt_graph import Graph
from furcate.builder.ops.tensorrt_weights import NamedWeights
from furcate.plugins.tree_attention.spec import AttentionSpec

SPLIT_LINEARS = (".o", ".down")
"""Linear layers whose input is divided among the ranks: their outputs are summed over all ranks."""


class AttentionForm(Protocol):
    """How tree attention is put into a network: `plugin` or `native`."""

    def plan(self, inputs: PassInputs, attention: AttentionSpec, local_rope: bool) -> Any:
        """What the layers of one pass share."""
        ...

    def attend(self, ops: TensorRTOps, prefix: str, layer: int, qkv: Array, plan: Any) -> Array:
        """[B,N,(Hq+2Hkv)*D] -> [B,N,Hq*D]; K/V is appended to the layer's cache."""
        ...


@dataclass(frozen=True, kw_only=True)
class EmissionSettings:
    """What the emission of a network is told beside its weights. With `num_ranks` > 1 the weights are one rank's."""

    attention: AttentionForm | None
    num_ranks: int = 1
    has_unit_offset_norm: bool = False


class TensorRTOps:
    """`Ops` over ITensors."""

    def __init__(self, graph: Graph, weights: NamedWeights, settings: EmissionSettings) -> None:
        self.graph = graph
        self.weights = weights
        self.settings = settings

    def has_weight(self, name: str) -> bool:
        return f"{name}.weight" in self.weights

    def embedding(self, name: str, token_ids: Array) -> Array:
        return self.graph.gather(self.weights.emitted(f"{name}.weight", 2), token_ids, 0)

    def linear(self, name: str, x: Array, residual: Array | None = None) -> Array:
        graph = self.graph
        out = graph.matmul(x, self.weights.emitted(f"{name}.weight", 3), transposes_b=True)
        if self.settings.num_ranks > 1 and name.endswith(SPLIT_LINEARS):
            layer = graph.tensorrt.add_all_reduce(graph.network, out, self.settings.num_ranks)
            out = graph.output(layer, f"{name}.all_reduce")
        if f"{name}.bias" in self.weights:
            out = graph.binary("SUM", out, self.weights.emitted(f"{name}.bias", 3))
        return out if residual is None else graph.binary("SUM", out, residual)

    def rms_norm(self, name: str, x: Array, eps: float, unit_offset: bool = False) -> Array:
        weight = self.graph.cast(self.weights.emitted(f"{name}.weight", len(x.shape)), torch.float32)
        return self.graph.cast(self.normed(x, weight, eps, unit_offset), self.graph.dtype)

    def normed(self, x: Array, weight: Array, eps: float, unit_offset: bool) -> Array:
        """RMS norm over the last axis in float32, times `weight` (or 1 + weight), not rounded."""
        graph, rank = self.graph, len(x.shape)
        if unit_offset:
            weight = graph.binary("SUM", weight, graph.scalar(1.0, torch.float32, rank))
        x = graph.cast(x, torch.float32)
        mean = graph.reduce("AVG", graph.binary("PROD", x, x), rank - 1)
        root = graph.unary("SQRT", graph.binary("SUM", mean, graph.scalar(eps, torch.float32, rank)))
        return graph.binary("PROD", graph.binary("DIV", x, root), weight)

    def gated_activation(self, gate_up: Array, activation: str) -> Array:
        gate, up = self.split(gate_up, 2)
        gate = self.silu(gate) if activation == Activation.SILU else self.graph.activation("GELU_TANH", gate)
        return self.graph.binary("PROD", gate, up)

    def add(self, a: Array, b: Array) -> Array:
        return self.graph.binary("SUM", a, b)

    def silu(self, x: Array) -> Array:
        return self.graph.binary("PROD", x, self.graph.activation("SIGMOID", x))

    def scale(self, x: Array, factor: float) -> Array:
        return self.graph.binary("PROD", x, self.graph.scalar(factor, self.graph.dtype, len(x.shape)))

    def softcap(self, x: Array, cap: float) -> Array:
        return self.scale(self.graph.activation("TANH", self.scale(x, 1.0 / cap)), cap)

    def concat(self, parts: list[Array]) -> Array:
        return self.graph.concat(parts, len(parts[0].shape) - 1)

    def split(self, x: Array, num_parts: int) -> list[Array]:
        width = x.shape[len(x.shape) - 1] // num_parts
        return [self.graph.last(x, part * width, width) for part in range(num_parts)]

    def take_rows(self, x: Array, rows: Array) -> Array:
        return self.graph.gather(x, rows, 1, num_elementwise=1)

    def experts(self, prefix: str, x: Array, spec: DecoderSpec) -> Array:
        """Every expert on every token, weighted by the router, as the torch executor does."""
        assert spec.num_experts is not None
        graph, out = self.graph, None
        weights = self._expert_weights(self.linear(f"{prefix}.router", x), spec)
        for expert in range(spec.num_experts):
            hidden = self.gated_activation(self.linear(f"{prefix}.experts.{expert}.gate_up", x), spec.activation)
            part = self.linear(f"{prefix}.experts.{expert}.down", hidden)
            part = graph.binary("PROD", part, graph.last(weights, expert, 1))
            out = part if out is None else graph.binary("SUM", out, part)
        return out

    def _expert_weights(self, scores: Array, spec: DecoderSpec) -> Array:
        """[B,N,E]: the router's probability of each of a token's top experts, zero for the others."""
        graph = self.graph
        softmax = graph.network.add_softmax(graph.cast(scores, torch.float32))
        softmax.axes = 1 << 2
        top = graph.network.add_topk(
            graph.output(softmax), graph.trt.TopKOperation.MAX, spec.num_experts_per_token, 1 << 2
        )
        kept, indices = graph.output(top), top.get_output(1)
        if spec.normalizes_expert_weights:
            kept = graph.binary("DIV", kept, graph.reduce("SUM", kept, 2))
        values = graph.constant(torch.tensor([0.0, 1.0]))
        depth = graph.constant(torch.tensor(spec.num_experts, dtype=torch.int32))
        chosen = graph.output(graph.network.add_one_hot(indices, values, depth, 3))
        weighted = graph.binary("PROD", chosen, graph.reshape(kept, (0, 0, 0, 1)))
        return graph.cast(graph.reduce("SUM", weighted, 2, keeps=False), graph.dtype)

    def plan(self, inputs: PassInputs, attention: AttentionSpec, local_rope: bool) -> Any:
        return self._form().plan(inputs, attention, local_rope)

    def tree_attention(self, prefix: str, layer: int, qkv: Array, plan: Any) -> Array:
        return self._form().attend(self, prefix, layer, qkv, plan)

    def _form(self) -> AttentionForm:
        assert self.settings.attention is not None, "this network has no attention"
        return self.settings.attention
