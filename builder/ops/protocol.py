"""The operations a network is written in. `ops/torch.py` runs them, `ops/tensorrt.py` emits them.

Weights are named, never passed: `linear("layers.0.o", x)` uses `layers.0.o.weight` and, where there is one, `.bias`.
"""

from typing import Any, Protocol

from furcate.builder.network.inputs import Array, PassInputs
from furcate.plugins.tree_attention.spec import AttentionSpec


class Ops(Protocol):
    """Every operation a decoder network needs; `x` has shape [..., width]."""

    def embedding(self, name: str, token_ids: Array) -> Array:
        """Rows of `name`.weight [V,H] -> [..., H]."""
        ...

    def linear(self, name: str, x: Array, residual: Array | None = None) -> Array:
        """`x @ weight.T (+ bias) (+ residual)`."""
        ...

    def has_weight(self, name: str) -> bool:
        """True when `name`.weight exists."""
        ...

    def rms_norm(self, name: str, x: Array, eps: float, unit_offset: bool = False) -> Array:
        """Root-mean-square norm over the last axis, computed in float32."""
        ...

    def gated_activation(self, gate_up: Array, activation: str) -> Array:
        """`act(gate) * up` of the two halves of the last axis."""
        ...

    def add(self, a: Array, b: Array) -> Array:
        """Element-wise sum."""
        ...

    def silu(self, x: Array) -> Array:
        """x * sigmoid(x)."""
        ...

    def scale(self, x: Array, factor: float) -> Array:
        """x times a constant."""
        ...

    def softcap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap)."""
        ...

    def concat(self, parts: list[Array]) -> Array:
        """Parts side by side along the last axis."""
        ...

    def split(self, x: Array, num_parts: int) -> list[Array]:
        """x cut into equal parts along the last axis: [..., H] -> num_parts times [..., H / num_parts]."""
        ...

    def take_rows(self, x: Array, rows: Array) -> Array:
        """x [B,N,H], rows [B,R] -> [B,R,H]."""
        ...

    def experts(self, prefix: str, x: Array, spec: Any) -> Array:
        """Mixture of experts: the router's top experts per token, each a gated MLP, weighted and summed."""
        ...

    def plan(self, inputs: PassInputs, attention: AttentionSpec, local_rope: bool) -> Any:
        """What all layers of one pass with this attention share: masks, slots, rotary rows."""
        ...

    def tree_attention(self, prefix: str, layer: int, qkv: Array, plan: Any) -> Array:
        """Rotates, appends K/V to the layer's pages, attends prefix and ancestors: [B,N,(Hq+2Hkv)*D] -> [B,N,Hq*D].

        `prefix`.q_norm and `prefix`.k_norm are applied per head before the rotation where the checkpoint has them.
        """
        ...
