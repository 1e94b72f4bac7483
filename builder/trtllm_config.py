"""config.json of the engine directory, in TensorRT-LLM's {version, pretrained_config, build_config} layout.

What its own readers ask for, in github.com/NVIDIA/TensorRT-LLM (! means mandatory: the reader fails without it):

tensorrt_llm/builder.py, EngineConfig.from_json_str
    version!, pretrained_config!, build_config!
tensorrt_llm/models/modeling_utils.py, PretrainedConfig
    architecture!, dtype!, hidden_size!, num_hidden_layers!, num_attention_heads!, vocab_size, hidden_act, logits_dtype,
    norm_epsilon, position_embedding_type, max_position_embeddings, num_key_value_heads, intermediate_size, mapping,
    quantization, head_size, qk_layernorm
tensorrt_llm/models/llama/config.py, LLaMAConfig
    attn_bias, mlp_bias, rotary_base, rotary_scaling, moe, tie_word_embeddings
tensorrt_llm/models/medusa/config.py, MedusaConfig
    num_medusa_heads, num_medusa_layers, max_draft_len, model_type
tensorrt_llm/models/eagle/config.py, EagleConfig
    eagle_net_config!, num_eagle_layers, max_draft_len, max_non_leaves_per_layer
tensorrt_llm/builder.py, BuildConfig.from_dict
    max_input_len!, max_seq_len!, max_batch_size!, max_beam_width!, max_num_tokens!, opt_num_tokens!, kv_cache_type!,
    strongly_typed, max_draft_len, speculative_decoding_mode (an int flag), use_refit, use_strip_plan, plugin_config
"""

from typing import Any

from furcate.builder.engine import Manifest
from furcate.builder.network.spec import Activation, DecoderSpec, HeadKind, RopeKind
from furcate.builder.tree_config import TreeConfig, TreeKind

TRTLLM_VERSION = "1.2.1"
ARCHITECTURES = {
    HeadKind.MEDUSA: "MedusaForCausalLM",
    HeadKind.EAGLE: "EagleForCausalLM",
    HeadKind.EAGLE3: "EagleForCausalLM",
}
SPECULATIVE_MODES = {
    None: 1,
    HeadKind.MEDUSA: 4,
    HeadKind.EAGLE: 32,
    HeadKind.EAGLE3: 32,
    HeadKind.HYDRA: 1,
    HeadKind.MODEL: 2,
}
"""SpeculativeDecodingMode in modeling_utils.py is an IntFlag: NONE, DRAFT_TOKENS_EXTERNAL, MEDUSA, LOOKAHEAD, EXPLICIT, EAGLE.

Hydra has no mode of its own there: the engine is recognised as its target.
"""
QUANT_ALGORITHMS = {None: None, "fp8": "FP8", "int4": "W4A16", "mixed": "MIXED_PRECISION"}
"""QuantAlgo in quantization/mode.py. Weights alone are quantised here; it has no name for fp8 weights alone."""
ACTIVATIONS = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_pytorch_tanh"}


def trtllm_config(manifest: Manifest) -> dict[str, Any]:
    """The JSON value of config.json."""
    return {
        "version": TRTLLM_VERSION,
        "pretrained_config": _pretrained_config(manifest),
        "build_config": _build_config(manifest),
    }


def _pretrained_config(manifest: Manifest) -> dict[str, Any]:
    target, head = manifest.target, manifest.head
    config = _decoder_config(manifest, target, target.architecture)
    config["quantization"]["quant_algo"] = QUANT_ALGORITHMS[manifest.weight_format]
    if head is None or head.kind not in ARCHITECTURES:
        return config
    config |= {"architecture": ARCHITECTURES[head.kind], "max_draft_len": manifest.tree.budget - 1}
    if head.kind is HeadKind.MEDUSA:
        model_type = "qwen2" if target.architecture.startswith("Qwen") else "llama"
        counts = {"num_medusa_heads": head.num_heads, "num_medusa_layers": head.num_blocks}
        return config | counts | {"model_type": model_type}
    assert head.decoder is not None
    return config | {
        "num_eagle_layers": max(1, manifest.tree.max_depth),
        "max_non_leaves_per_layer": max_non_leaves(manifest.tree),
        "eagle_net_config": _decoder_config(manifest, head.decoder, "LlamaForCausalLM"),
    }


def max_non_leaves(tree: TreeConfig) -> int:
    """Nodes of a level that may have children: a dynamic tree's top-k, else at most the whole budget."""
    return tree.top_k if tree.kind is TreeKind.DYNAMIC else max(1, tree.budget - 1)


def _decoder_config(manifest: Manifest, spec: DecoderSpec, architecture: str) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "dtype": manifest.dtype.value,
        "logits_dtype": "float32",
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": manifest.max_context_tokens,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_query_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_size": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_act": ACTIVATIONS[spec.activation],
        "norm_epsilon": spec.norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": spec.rope.theta,
        "rotary_scaling": _rotary_scaling(spec),
        "attn_bias": spec.has_qkv_bias,
        "mlp_bias": False,
        "qk_layernorm": spec.has_qk_norm,
        "tie_word_embeddings": spec.is_tied,
        "mapping": {"world_size": manifest.tp_size, "tp_size": manifest.tp_size, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **_experts(spec),
    }


def _rotary_scaling(spec: DecoderSpec) -> dict[str, Any] | None:
    """Both spellings of the kind: older readers ask for `type`, newer ones for `rope_type`."""
    if spec.rope.kind is RopeKind.DEFAULT:
        return None
    return {**spec.rope.parameters, "type": spec.rope.kind.value, "rope_type": spec.rope.kind.value}


def _experts(spec: DecoderSpec) -> dict[str, Any]:
    if spec.num_experts is None:
        return {}
    # ExpertScaleNormalizationMode: NONE 0, RENORMALIZE 1.
    mode = int(spec.normalizes_expert_weights)
    return {"moe": {"num_experts": spec.num_experts, "top_k": spec.num_experts_per_token, "normalization_mode": mode}}


def _build_config(manifest: Manifest) -> dict[str, Any]:
    most_rows = max(manifest.max_batch_size * manifest.tree.budget, manifest.prefill_chunk_tokens)
    plan = manifest.tensorrt
    return {
        "max_input_len": manifest.max_context_tokens - 1,
        "max_seq_len": manifest.max_context_tokens,
        "max_batch_size": manifest.max_batch_size,
        "max_beam_width": 1,
        "max_num_tokens": most_rows,
        "opt_num_tokens": manifest.max_batch_size,
        "kv_cache_type": "PAGED",
        "strongly_typed": True,
        "max_draft_len": manifest.tree.budget - 1,
        "speculative_decoding_mode": SPECULATIVE_MODES[manifest.head_kind],
        "use_refit": plan is not None and plan.is_refittable,
        "use_strip_plan": plan is not None and plan.is_stripped,
        "plugin_config": {
            "paged_kv_cache": True,
            "tokens_per_block": manifest.page_size,
            "remove_input_padding": False,
            "gpt_attention_plugin": None,
        },
    }
