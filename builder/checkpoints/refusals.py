"""The reason why a model that furcate cannot serve is refused, from its config.json alone."""

from pathlib import Path
from typing import Any

from furcate.builder.checkpoints.families import FAMILIES
from furcate.builder.errors import CheckpointError

# Kinds of layers (`layer_types`) whose past is rows of K/V, one per token, so that rows can be dropped.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT_FIELDS = (
    "ssm_cfg", "mamba_d_state", "mamba_d_conv", "state_size", "conv_L_cache", "linear_num_key_heads",
    "linear_attn_config", "hybrid_override_pattern", "layers_block_type", "block_types", "lru_width", "rescale_every",
)  # fmt: skip


def refuse_unsupported(config: dict[str, Any], source: Path) -> None:
    """Raises CheckpointError with the reason, unless config.json describes a decoder that furcate reads."""
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            f"{source} is an encoder-decoder model ({model_type}); furcate serves decoder-only models."
        )
    recurrent = _recurrent_evidence(config) or _recurrent_evidence(config.get("text_config") or {})
    if recurrent is not None:
        raise CheckpointError(
            f"{source} is a hybrid or recurrent model ({model_type}: {recurrent}); its state cannot be rolled back to the "
            "accepted path of a tree, so furcate serves attention-only decoders."
        )
    if "text_config" in config:
        raise CheckpointError(
            f"{source} is a multimodal model ({model_type}); give a directory with a text-only decoder."
        )
    if model_type not in FAMILIES:
        raise CheckpointError(f"{source} is of model_type '{model_type}'; supported are {', '.join(FAMILIES)}.")
    _refuse_other_tasks(config, source)


def _refuse_other_tasks(config: dict[str, Any], source: Path) -> None:
    architectures = config.get("architectures") or []
    # Medusa's merged checkpoints name their own class and are causal language models all the same.
    if architectures and not any(name.endswith("ForCausalLM") or "Medusa" in name for name in architectures):
        raise CheckpointError(f"{source} is a {architectures[0]}; a causal language model (...ForCausalLM) is needed.")


def _recurrent_evidence(config: dict[str, Any]) -> str | None:
    """What in this configuration says that some layers carry a recurrent state; None when nothing does."""
    for kind in config.get("layer_types") or []:
        if kind not in _ATTENTION_LAYERS:
            return f"layers of type '{kind}'"
    present = [field for field in _RECURRENT_FIELDS if config.get(field) is not None]
    return f"config.json has {present[0]}" if present else None
