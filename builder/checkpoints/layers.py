"""Which stored tensors make a decoder layer, in every spelling that Hugging Face checkpoints use."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from furcate.builder.checkpoints.named import Part, TensorPlan
from furcate.builder.network.spec import DecoderSpec

IGNORED_BUFFERS = (
    r".*rotary_emb\.inv_freq",
    r".*rotary_emb\.original_inv_freq",
    r".*rotary_emb\.(cos|sin)_cached",
)
"""Buffers that old exporters saved; furcate computes them."""


@dataclass(frozen=True)
class LayerPlan:
    """Adds one decoder layer to a plan: `name` is its named prefix, `stored` its stored one."""

    plan: TensorPlan
    spec: DecoderSpec
    name: str
    stored: str

    def add_norm(self, name: str, stored: str, size: int | None = None) -> None:
        """A norm's weight [size] (default: the hidden size)."""
        self.plan.add(
            f"{self.name}.{name}.weight", Part(f"{self.stored}.{stored}.weight", (size or self.spec.hidden_size,))
        )

    def add_attention(self, input_size: int | None = None) -> None:
        """qkv (fused from three, or stored fused), o, their biases, and the qk norms. EAGLE-3's `input_size` is 2 H."""
        spec, stored = self.spec, f"{self.stored}.self_attn"
        columns = input_size or spec.hidden_size
        query, key = spec.num_query_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if f"{stored}.qkv_proj.weight" in self.plan.stored:
            rows = {"qkv_proj": query + 2 * key}
        else:
            rows = {"q_proj": query, "k_proj": key, "v_proj": key}
        self._add_linear("qkv", stored, rows, columns, has_bias=spec.has_qkv_bias)
        self._add_linear("o", stored, {"o_proj": spec.hidden_size}, query, has_bias=spec.has_output_bias)
        if spec.has_qk_norm:
            self.add_norm("q_norm", "self_attn.q_norm", spec.head_dim)
            self.add_norm("k_norm", "self_attn.k_norm", spec.head_dim)

    def add_mlp(self) -> None:
        """gate_up (fused from two, or stored fused) and down."""
        size, stored = self.spec.intermediate_size, f"{self.stored}.mlp"
        if f"{stored}.gate_up_proj.weight" in self.plan.stored:
            rows = {"gate_up_proj": 2 * size}
        else:
            rows = {"gate_proj": size, "up_proj": size}
        self._add_linear("gate_up", stored, rows, self.spec.hidden_size)
        self._add_linear("down", stored, {"down_proj": self.spec.hidden_size}, size)

    def add_experts(self, num_experts: int) -> None:
        """Router and experts: Mixtral's w1/w3/w2, Qwen's projections, or transformers 5's one tensor for all experts."""
        spec, hidden, size = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        old = f"{self.stored}.block_sparse_moe"
        stored = old if f"{old}.gate.weight" in self.plan.stored else f"{self.stored}.mlp"
        self.plan.add(f"{self.name}.router.weight", Part(f"{stored}.gate.weight", (num_experts, hidden)))
        is_fused = f"{stored}.experts.gate_up_proj" in self.plan.stored
        gate, up, down = ("w1", "w3", "w2") if stored == old else ("gate_proj", "up_proj", "down_proj")
        for expert in range(num_experts):
            name, one = f"{self.name}.experts.{expert}", f"{stored}.experts.{expert}"
            if is_fused:
                pick = _entry(expert)
                shape_up, shape_down = (num_experts, 2 * size, hidden), (num_experts, hidden, size)
                self.plan.add(f"{name}.gate_up.weight", Part(f"{stored}.experts.gate_up_proj", shape_up, pick))
                self.plan.add(f"{name}.down.weight", Part(f"{stored}.experts.down_proj", shape_down, pick))
                continue
            gate_up = (Part(f"{one}.{gate}.weight", (size, hidden)), Part(f"{one}.{up}.weight", (size, hidden)))
            self.plan.add(f"{name}.gate_up.weight", *gate_up)
            self.plan.add(f"{name}.down.weight", Part(f"{one}.{down}.weight", (spec.hidden_size, size)))

    def _add_linear(
        self, name: str, stored: str, rows: dict[str, int], columns: int, *, has_bias: bool = False
    ) -> None:
        weights = (Part(f"{stored}.{part}.weight", (count, columns)) for part, count in rows.items())
        self.plan.add(f"{self.name}.{name}.weight", *weights)
        if has_bias:
            biases = (Part(f"{stored}.{part}.bias", (count,)) for part, count in rows.items())
            self.plan.add(f"{self.name}.{name}.bias", *biases)


def _entry(index: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[index]
