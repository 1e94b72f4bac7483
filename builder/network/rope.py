"""Every rotary scaling as one cos/sin table, so that kernels and engines know only a table."""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import DecoderSpec, RopeKind, RopeSpec


def rope_table(
    spec: DecoderSpec, num_positions: int, rope: RopeSpec | None = None
) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
    """(cos, sin), float32 [num_positions, head_dim / 2], attention factor multiplied in.

    The table covers the engine's context, not the head's or the checkpoint's max_position_embeddings. Scalings that depend on
    the text's length (dynamic, longrope) are taken at `num_positions`, the longest text the engine serves, because cached keys
    are already rotated.
    """
    rope = rope or spec.rope
    if rope.kind is RopeKind.DEFAULT:
        exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        inverse, factor = 1.0 / (rope.theta**exponent), 1.0
    else:
        inverse, factor = _scaled_frequencies(spec, rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse.float()[None, :]
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()


def _scaled_frequencies(spec: DecoderSpec, rope: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """transformers' own frequencies of a scaling, so that they cannot drift from the model the checkpoint was trained with."""
    if rope.kind.value not in ROPE_INIT_FUNCTIONS:
        allowed = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise ConfigError(
            f"rope scaling '{rope.kind.value}' is not known to transformers; allowed are default, {allowed}."
        )
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_query_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
    )
    parameters = {"rope_type": rope.kind.value, "rope_theta": rope.theta, **rope.parameters}
    parameters.setdefault("original_max_position_embeddings", spec.max_positions)
    config.rope_parameters = parameters
    inverse, factor = ROPE_INIT_FUNCTIONS[rope.kind.value](config, torch.device("cpu"), seq_len=num_positions)
    return inverse, factor
