"""config.json of the engine directory, in TensorRT-LLM 1.2's {version, pretrained_config, build_config} layout."""

from typing import Any

from furcate.builder.engine import Manifest
from furcate.builder.network.spec import HeadKind

TRTLLM_VERSION = "1.2.1"
ARCHITECTURES = {
    HeadKind.MEDUSA: "MedusaForCausalLM",
    HeadKind.EAGLE: "EagleForCausalLM",
    HeadKind.EAGLE3: "EagleForCausalLM",
}


def trtllm_config(manifest: Manifest) -> dict[str, Any]:
    """The JSON value of config.json."""
    return {
        "version": TRTLLM_VERSION,
        "pretrained_config": _pretrained_config(manifest),
        "build_config": _build_config(manifest),
    }


def _pretrained_config(manifest: Manifest) -> dict[str, Any]:
    target, head = manifest.target, manifest.head
    architecture = ARCHITECTURES.get(head.kind, "LlamaForCausalLM") if head is not None else "LlamaForCausalLM"
    config: dict[str, Any] = {
        "architecture": architecture,
        "dtype": manifest.dtype.value,
        "logits_dtype": "float32",
        "vocab_size": target.vocab_size,
        "max_position_embeddings": manifest.max_context_tokens,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.num_query_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_size": target.head_dim,
        "intermediate_size": target.intermediate_size,
        "hidden_act": target.activation.value,
        "norm_epsilon": target.norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": target.rope.theta,
        "share_embedding_table": target.is_tied,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    if head is not None and head.kind is HeadKind.MEDUSA:
        config |= {"num_medusa_heads": head.num_heads, "num_medusa_layers": head.num_blocks}
    if head is not None:
        config |= {"max_draft_len": manifest.tree.budget - 1}
    return config


def _build_config(manifest: Manifest) -> dict[str, Any]:
    modes = {None: "NONE", HeadKind.MEDUSA: "MEDUSA", HeadKind.HYDRA: "MEDUSA"}
    return {
        "max_input_len": manifest.max_context_tokens - 1,
        "max_seq_len": manifest.max_context_tokens,
        "max_batch_size": manifest.max_batch_size,
        "max_num_tokens": manifest.max_batch_size * max(manifest.tree.budget, manifest.prefill_chunk_tokens),
        "max_draft_len": manifest.tree.budget - 1,
        "speculative_decoding_mode": modes.get(manifest.head_kind, "EAGLE"),
        "kv_cache_type": "paged",
        "plugin_config": {"paged_kv_cache": True, "tokens_per_block": manifest.page_size},
    }
