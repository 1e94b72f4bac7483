"""The single decoder layer of an EAGLE head, from the head's configuration and stored names."""

from dataclasses import replace
from typing import Any

from furcate.builder.checkpoints.families import decoder_spec
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.rotary import describe_rope
from furcate.builder.checkpoints.target import load_config
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec

# Exporters copy the target's model_type; the layer that EAGLE's trainers build is Llama's all the same. Only speculators has
# a second one. Gemma's norms would make another layer, so its types are not among them.
_LLAMA_LAYERS = ("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
_SPECULATORS_LAYERS = ("llama", "qwen3")
ATTENTION = "layers.0.self_attn"


def head_decoder(source: HeadSource, config: dict[str, Any]) -> DecoderSpec:
    """The head's layer as data: sizes and rope from the head's `config`, positions and vocabulary from the target.

    The head's max_position_embeddings is ignored on purpose: many heads say 2048 and serve longer texts. Biases are told by
    the stored names, because exporters disagree on the field that announces them.
    """
    if config.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"{source.path} has {config['num_hidden_layers']} decoder layers; heads of one are supported."
        )
    has_bias = f"{ATTENTION}.q_proj.bias" in source.stored
    if not has_bias and (config.get("attention_bias") or config.get("qkv_bias")):
        raise CheckpointError(
            f"{source.path}: config.json announces attention biases, but none are stored; export it again."
        )
    # num_hidden_layers is said here because a configuration class would default to a whole model's.
    layer_config = {**config, "model_type": _layer_type(source, config), "num_hidden_layers": 1}
    architecture = (source.config.get("architectures") or ["LlamaForCausalLM"])[0]
    spec = decoder_spec(load_config(source.path, layer_config), architecture)
    spec = replace(
        spec,
        vocab_size=source.target.vocab_size,
        max_positions=source.target.max_positions,
        is_tied=False,
        has_qkv_bias=has_bias,
        has_output_bias=f"{ATTENTION}.o_proj.bias" in source.stored,
        has_qk_norm=spec.has_qk_norm or f"{ATTENTION}.q_norm.weight" in source.stored,
        bos_token_id=None,
        eos_token_ids=(),
    )
    _warn_of_other_rope(source, spec)
    return spec


def _layer_type(source: HeadSource, config: dict[str, Any]) -> str:
    """The transformers model_type whose layer the head's is."""
    is_speculators = "speculators_model_type" in source.config
    model_type, allowed = config.get("model_type", "llama"), _SPECULATORS_LAYERS if is_speculators else _LLAMA_LAYERS
    if model_type not in allowed:
        raise CheckpointError(
            f"{source.path}: a head of model_type '{model_type}' is not supported; allowed are {', '.join(allowed)}."
        )
    return model_type if is_speculators else "llama"


def _warn_of_other_rope(source: HeadSource, spec: DecoderSpec) -> None:
    if spec.rope != source.target.rope:
        source.warnings.append(
            f"the head rotates with {describe_rope(spec.rope)}, the target with {describe_rope(source.target.rope)}: each keeps "
            "its own. If few drafts are accepted, the head's config.json has lost what it was trained with."
        )
