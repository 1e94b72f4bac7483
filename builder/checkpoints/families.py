"""DecoderSpec of a Hugging Face configuration: what each decoder family adds to plain Llama, as data.

Sources: transformers 5.24 modeling files of each family (sliding windows, norms, soft-capping and router as they compute them).
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from furcate.builder.checkpoints.rotary import rope_spec
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import Activation, DecoderSpec

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


def decoder_spec(config: PreTrainedConfig, architecture: str) -> DecoderSpec:
    """The decoder that `config` describes. Raises CheckpointError for what no field of DecoderSpec can say."""
    heads = config.num_attention_heads
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_query_heads": heads,
        "num_kv_heads": config.num_key_value_heads or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "max_positions": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": _activation(config),
        "is_tied": bool(config.tie_word_embeddings),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": token_ids(config.eos_token_id),
    }
    fields.update(FAMILIES[config.model_type](config))
    if "rope" not in fields:
        fields["rope"] = rope_spec(config)
    spec = DecoderSpec(**fields)
    if spec.num_query_heads % spec.num_kv_heads != 0:
        raise CheckpointError(
            f"config.json has {spec.num_query_heads} attention heads and {spec.num_kv_heads} key-value heads; "
            "the first must be a multiple of the second."
        )
    return spec


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The token ids of a field that holds none, one or several."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _activation(config: PreTrainedConfig) -> Activation:
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"activation '{name}' is not supported; allowed are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _everywhere_sliding(config: PreTrainedConfig) -> dict[str, Any]:
    window = getattr(config, "sliding_window", None)
    # Phi-3.5's window is wider than its context: every layer sees everything.
    return {} if window is None or window >= config.max_position_embeddings else {"sliding_window": window}


def _sliding_by_layer(config: PreTrainedConfig) -> dict[str, Any]:
    layers = tuple(i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention")
    return {"sliding_window": config.sliding_window, "sliding_layers": layers} if layers else {}


def _llama(config: PreTrainedConfig) -> dict[str, Any]:
    if config.mlp_bias:
        raise CheckpointError("config.json has mlp_bias: true; only MLPs without bias are supported.")
    return {"has_qkv_bias": config.attention_bias, "has_output_bias": config.attention_bias}


def _qwen2(config: PreTrainedConfig) -> dict[str, Any]:
    return {"has_qkv_bias": True, **_sliding_by_layer(config)}


def _qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    bias = config.attention_bias
    return {"has_qk_norm": True, "has_qkv_bias": bias, "has_output_bias": bias, **_sliding_by_layer(config)}


def _mixtral(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_local_experts,
        "num_experts_per_token": config.num_experts_per_tok,
        **_everywhere_sliding(config),
    }


def _qwen3_moe(config: PreTrainedConfig) -> dict[str, Any]:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise CheckpointError(
            "config.json mixes dense and expert layers (mlp_only_layers, decoder_sparse_step); all layers must have experts."
        )
    return {
        "has_qk_norm": True,
        "has_qkv_bias": config.attention_bias,
        "has_output_bias": config.attention_bias,
        "intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_tok,
        "normalizes_expert_weights": config.norm_topk_prob,
        **_everywhere_sliding(config),
    }


def _gemma2(config: PreTrainedConfig) -> dict[str, Any]:
    if getattr(config, "use_bidirectional_attention", None):
        raise CheckpointError(
            "config.json has use_bidirectional_attention: it is an encoder, which cannot generate text."
        )
    return {
        "has_qkv_bias": config.attention_bias,
        "has_output_bias": config.attention_bias,
        "has_sandwich_norms": True,
        "has_unit_offset_norm": True,
        "embedding_scale": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
        **_sliding_by_layer(config),
    }


def _gemma3(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        **_gemma2(config),
        "has_qk_norm": True,
        "rope": rope_spec(config, "full_attention"),
        "local_rope": rope_spec(config, "sliding_attention"),
    }


FAMILIES: dict[str, Callable[[PreTrainedConfig], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _everywhere_sliding,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _everywhere_sliding,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
"""Fields that differ from plain Llama, of each supported `model_type`."""
