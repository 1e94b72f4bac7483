"""Runs a network with torch: on the CPU with prepacked linears, on CUDA with the fused tree-attention kernel.

Axes: B batch, N nodes, H hidden, D head_dim, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.spec import Activation, DecoderSpec
from furcate.plugins.tree_attention.cpu import AttentionPlan
from furcate.plugins.tree_attention.op import KernelPlan, attend, plan_attention
from furcate.plugins.tree_attention.spec import AttentionSpec, HeadNorms, RopeTable, TreeBatch

MOST_PACKED_FLOAT32_ROWS = 48


@dataclass(frozen=True, kw_only=True)
class RopeTables:
    """The rotary table of global layers, and of sliding layers where theirs differs (Gemma 3)."""

    everywhere: RopeTable
    local: RopeTable | None = None


class PlainLinear:
    """A linear layer as torch has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else out + residual


class PackedLinear:
    """A linear layer whose weight oneDNN has laid out once for its own kernels.

    In bfloat16 on a CPU with AMX a target pass takes about two thirds of the time of `F.linear`'s.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        # A single row takes a slower kernel than a few: plain decoding gains a quarter or more from three rows of padding.
        if x.numel() == x.shape[-1]:
            shape = (*x.shape[:-1], self.packed.shape[0])
            return self._apply(_in_company(x), None if residual is None else _in_company(residual))[:1].view(shape)
        return self._apply(x, residual)

    def _apply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")


def _in_company(row: Tensor) -> Tensor:
    """The row four times, [4, width]."""
    return row.reshape(1, -1).expand(4, -1).contiguous()


class Float32Linear:
    """A float32 layer: packed for the few rows of a tree, torch's for a prompt chunk.

    Packed float32 is up to a third faster up to about 48 rows and no faster beyond, where torch's kernel also sums in
    shorter runs: a 300-token prompt's logits are then within 1e-4 of transformers'. The plain weight is memory-mapped.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.plain, self.packed = PlainLinear(weight, bias), PackedLinear(weight, bias)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        return (self.packed if num_rows <= MOST_PACKED_FLOAT32_ROWS else self.plain)(x, residual)


def linear_of(weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear | Float32Linear:
    """The fastest linear layer this device and dtype have."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return PlainLinear(weight, bias)
    if weight.dtype is torch.float32:
        return Float32Linear(weight, bias)
    return PackedLinear(weight, bias) if weight.dtype is torch.bfloat16 else PlainLinear(weight, bias)


Linear = PlainLinear | PackedLinear | Float32Linear


def head_norms(query: Tensor, key: Tensor, has_unit_offset: bool) -> HeadNorms:
    """Per-head norm weights in float32, Gemma's 1 + w added."""
    offset = 1.0 if has_unit_offset else 0.0
    return HeadNorms(query=query.float() + offset, key=key.float() + offset)


class TorchOps:
    """`Ops` over torch tensors.

    `weights` are the named tensors, already in the compute dtype and on the device; 2-D ones named by `linears` become linear
    layers, the rest are read as they are. `pool` [layers, pages, 2, page_size, Hkv, D] is written in place.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        rope: RopeTables | None,
        pool: Tensor | None,
        has_unit_offset_norm: bool = False,
    ) -> None:
        self.rope = rope
        self.pool = pool
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._norms: dict[str, HeadNorms] = {}
        self._lm_head_weight = weights.get("lm_head.weight")
        for name, tensor in weights.items():
            base = name.removesuffix(".weight")
            if name.endswith(".weight") and tensor.ndim == 2 and base != "embed_tokens":
                self._linears[base] = linear_of(tensor, weights.get(f"{base}.bias"))
            else:
                self._tensors[name] = tensor
            if base.endswith(".q_norm"):
                prefix = base.removesuffix(".q_norm")
                self._norms[prefix] = head_norms(tensor, weights[f"{prefix}.k_norm.weight"], has_unit_offset_norm)

    def tie_lm_head(self) -> None:
        """Uses the embedding table as the vocabulary projection."""
        self._lm_head_weight = self._tensors["embed_tokens.weight"]
        self._linears["lm_head"] = linear_of(self._lm_head_weight, None)

    def borrow_lm_head(self, target: "TorchOps", token_ids: Tensor | None) -> None:
        """Uses the target's vocabulary projection, or only its rows `token_ids` [Vd]: a draft head needs no full vocabulary."""
        if token_ids is None:
            self._linears["lm_head"] = target._linears["lm_head"]
        else:
            self._linears["lm_head"] = linear_of(target.lm_head_weight()[token_ids], None)

    def lm_head_weight(self) -> Tensor:
        """The vocabulary projection [V, H] as a plain tensor."""
        assert self._lm_head_weight is not None, "this network has no vocabulary projection"
        return self._lm_head_weight

    def share_embedding(self, other: "TorchOps") -> None:
        """Uses another network's embedding table."""
        self._tensors["embed_tokens.weight"] = other._tensors["embed_tokens.weight"]

    def has_weight(self, name: str) -> bool:
        return name in self._linears or f"{name}.weight" in self._tensors

    def embedding(self, name: str, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._tensors[f"{name}.weight"])

    def linear(self, name: str, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._linears[name](x, residual)

    def rms_norm(self, name: str, x: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        if unit_offset:
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = F.silu(gate) if activation == Activation.SILU else F.gelu(gate, approximate="tanh")
        return gate.mul_(up)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        # Gemma rounds its embedding scale to the compute dtype before it multiplies.
        return x * torch.full((), factor, dtype=x.dtype, device=x.device)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def concat(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=-1)

    def split(self, x: Tensor, num_parts: int) -> list[Tensor]:
        return list(x.chunk(num_parts, dim=-1))

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[-1]))

    def experts(self, prefix: str, x: Tensor, spec: DecoderSpec) -> Tensor:
        """Every expert runs on every token and the router's weights pick: exact, free of host reads, not fast."""
        assert spec.num_experts is not None and spec.num_experts_per_token is not None
        scores = torch.softmax(self.linear(f"{prefix}.router", x).float(), dim=-1)
        top = torch.topk(scores, spec.num_experts_per_token, dim=-1)
        kept = top.values / top.values.sum(-1, keepdim=True) if spec.normalizes_expert_weights else top.values
        weights = torch.zeros_like(scores).scatter_(-1, top.indices, kept).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in range(spec.num_experts):
            hidden = self.gated_activation(self.linear(f"{prefix}.experts.{expert}.gate_up", x), spec.activation)
            out += self.linear(f"{prefix}.experts.{expert}.down", hidden) * weights[..., expert, None]
        return out

    def plan(self, inputs: PassInputs, attention: AttentionSpec, local_rope: bool) -> AttentionPlan | KernelPlan:
        assert self.rope is not None and self.pool is not None, "this network has no attention"
        rope = self.rope.local if local_rope and self.rope.local is not None else self.rope.everywhere
        batch = TreeBatch(
            positions=inputs.positions,
            tree_mask=inputs.tree_mask,
            cache_lengths=inputs.cache_lengths,
            page_table=inputs.page_table,
            node_offset=inputs.node_offset,
            num_nodes=inputs.num_nodes,
            is_chain=inputs.tree_mask is None,
        )
        return plan_attention(batch, attention, rope, self.pool)

    def tree_attention(self, prefix: str, layer: int, qkv: Tensor, plan: AttentionPlan | KernelPlan) -> Tensor:
        assert self.pool is not None
        return attend(qkv, self.pool[layer], plan, self._norms.get(prefix))
