"""What a target and a head are, as data: family differences are fields here, never subclasses.

Named-tensor form (`checkpoints/` produces it, `network/` consumes it). All weights are `[out, in]`.

target
    embed_tokens.weight [V, H]            lm_head.weight [V, H] (absent when tied)      norm.weight [H]
    layers.{i}.input_norm.weight [H]      layers.{i}.post_norm.weight [H]  (norm before the MLP)
    layers.{i}.qkv.weight [(Hq + 2 Hkv) D, H], .bias          layers.{i}.o.weight [H, Hq D], .bias
    layers.{i}.q_norm.weight [D], layers.{i}.k_norm.weight [D]      (has_qk_norm)
    layers.{i}.gate_up.weight [2 I, H] (gate rows first), layers.{i}.down.weight [H, I]
    layers.{i}.attention_out_norm.weight, layers.{i}.mlp_out_norm.weight [H]      (has_sandwich_norms, Gemma 2/3)
    layers.{i}.router.weight [E, H], layers.{i}.experts.{e}.gate_up.weight, .down.weight   (num_experts)
head eagle3
    fc.weight [H, 3 Ht] (.bias)   layers.0.hidden_norm.weight [H]   layers.0.qkv.weight [(Hq + 2 Hkv) D, 2 H]
    layers.0.{input_norm,o,post_norm,gate_up,down}   norm.weight   lm_head.weight [Vd, H]   (embed_tokens.weight [V, H])
    fc_norm.weight [3 Ht]  (has_fc_norm: speculators' norm_before_fc)
    tap_norms.{k}.weight [Ht]  (has_tap_norms: fc_norm of speculators and SpecForge, one norm for each tap)
    layers.0.{q_norm,k_norm}.weight [D]  (decoder.has_qk_norm)
head eagle
    fc.weight [H, 2 H] (.bias)   layers.0.{qkv,o,post_norm,gate_up,down}     (embed_tokens.weight)
head medusa
    heads.{i}.blocks.{j}.weight [H, H], .bias [H]      heads.{i}.lm_head.weight [Vd, H] (absent: the target's)
head hydra
    heads.{i}.blocks.0.weight [H, H (i + 2)], heads.{i}.blocks.{j}.weight [H, H], .bias; heads.{i}.lm_head.weight [V, H], .bias
    heads.{i}.residual.weight [H, H (i + 2)], .bias: the residual of block 0, residual(x) + silu(blocks.0(x))
    (not is_grounded: heads read the hidden state alone; blocks.0 is [H, H], there is no residual projection)
    prefix layer: layers.0.{input_norm,qkv,o,post_norm,gate_up,down}, then norm.weight [H] (prefix-mlp)
head model
    the names of a target: a whole draft model (decoder.num_layers layers)
any head with its own draft vocabulary
    draft_token_ids int64 [Vd]: target id of each draft id, ascending
"""

from dataclasses import dataclass, field
from enum import StrEnum


class HeadKind(StrEnum):
    """The trained draft weights beside a target."""

    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MEDUSA = "medusa"
    HYDRA = "hydra"
    MODEL = "model"
    """Not a head but a whole draft model of the target's vocabulary."""


class Activation(StrEnum):
    """The gated MLP's activation."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class RopeKind(StrEnum):
    """How rotary frequencies are scaled; all of them end as one cos/sin table."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. `parameters` holds the scaling fields under transformers 5's `rope_parameters` names."""

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    parameters: dict[str, float | int | bool | list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder family as data. Sizes are counts; `sliding_window` is in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-5
    activation: Activation = Activation.SILU
    rope: RopeSpec = field(default_factory=RopeSpec)
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    has_unit_offset_norm: bool = False
    """RMSNorm multiplies by (1 + weight), as in Gemma."""
    embedding_scale: float | None = None
    attention_scale: float | None = None
    """Multiplies q.k; None means head_dim ** -0.5."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    """Layers that use `sliding_window`; None means all of them (when it is set)."""
    local_rope: RopeSpec | None = None
    """Rotary embedding of the sliding layers where it differs (Gemma 3)."""
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    normalizes_expert_weights: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head as data.

    `feature_layers` are the taps in the input-of-layer convention: the residual stream entering that layer;
    `num_layers` of the target means the last hidden state after the final norm.
    """

    kind: HeadKind
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    decoder: DecoderSpec | None = None
    """The head's own decoder layer (eagle, eagle3, hydra prefix). Its rope is what the head was trained with, its positions are
    the target's."""
    num_heads: int = 0
    """Medusa, Hydra: number of heads."""
    num_blocks: int = 0
    """Medusa, Hydra: residual blocks per head."""
    has_fc_bias: bool = False
    has_fc_norm: bool = False
    has_tap_norms: bool = False
    """EAGLE-3, fc_norm of speculators and SpecForge: every tap is normed on its own before `fc`."""
    has_norm_before_residual: bool = False
    """EAGLE-3, speculators: the residual is the normed hidden instead of the un-normed one."""
    feeds_back_normed: bool = False
    """EAGLE-3, speculators' norm_output: the recurrent state is taken after `norm`."""
    owns_embedding: bool = False
    owns_lm_head: bool = False
    has_prefix_layer: bool = False
    """Hydra: a prefix-mlp decoder layer refines the hidden state first."""
    is_grounded: bool = False
    """Hydra: head i also reads the embeddings of the i + 1 tokens before the one it predicts."""
