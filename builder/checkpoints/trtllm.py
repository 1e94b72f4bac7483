"""TensorRT-LLM checkpoints (config.json and rank<R>.safetensors of its convert scripts) under Hugging Face's names.

Their tensors are renamed and, for several ranks, put together again; every other reader then works as on a Hugging Face
directory. Names as in github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/models/llama/convert.py: qkv is fused rank by rank, `mlp.fc`
is the gate projection and `mlp.gate` the up projection. Heads in such checkpoints are read by trtllm_heads.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furcate.builder.checkpoints.stored import StoredTensor, read_json, stored_file
from furcate.builder.errors import CheckpointError

MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
# TensorRT-LLM's name, Hugging Face's, and the axis that ranks divide (None: whole on every rank).
LAYER_NAMES: tuple[tuple[str, str, int | None], ...] = (
    ("attention.dense.weight", "self_attn.o_proj.weight", 1),
    ("attention.q_layernorm.weight", "self_attn.q_norm.weight", None),
    ("attention.k_layernorm.weight", "self_attn.k_norm.weight", None),
    ("mlp.fc.weight", "mlp.gate_proj.weight", 0),
    ("mlp.gate.weight", "mlp.up_proj.weight", 0),
    ("mlp.proj.weight", "mlp.down_proj.weight", 1),
    ("input_layernorm.weight", "input_layernorm.weight", None),
    ("post_layernorm.weight", "post_attention_layernorm.weight", None),
)
TOP_NAMES: dict[str, tuple[str, int | None]] = {
    "transformer.vocab_embedding.weight": ("model.embed_tokens.weight", None),
    "transformer.ln_f.weight": ("model.norm.weight", None),
    "lm_head.weight": ("lm_head.weight", 0),
}
WITH_HEADS = ("MedusaForCausalLM", "EagleForCausalLM")
"""Checkpoints that hold a target and its heads."""
HEAD_PREFIXES = ("medusa_heads.", "eagle_nets.")


def is_trtllm(path: Path) -> bool:
    """Whether a directory is a TensorRT-LLM checkpoint."""
    return (
        (path / "rank0.safetensors").is_file()
        and (path / "config.json").is_file()
        and not (path / "manifest.json").exists()
    )


def trtllm_target(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """(config.json as Hugging Face writes it, stored tensors under Hugging Face's names). Raises CheckpointError."""
    config = read_json(path / "config.json")
    _refuse_unknown(config, path)
    ranks = rank_files(config, path)
    renamed: dict[str, StoredTensor] = {}
    for name in ranks[0]:
        if not name.startswith(HEAD_PREFIXES):
            plain, axis, sizes = hugging_face_name(name, config)
            renamed[plain] = joined([rank[name] for rank in ranks], axis, sizes)
    return hugging_face_config(config), renamed


def _refuse_unknown(config: dict[str, Any], path: Path) -> None:
    architecture = config.get("architecture")
    if architecture not in (*MODEL_TYPES, *WITH_HEADS):
        allowed = ", ".join((*MODEL_TYPES, *WITH_HEADS))
        raise CheckpointError(f"{path} is a TensorRT-LLM checkpoint of {architecture}; supported are {allowed}.")
    if (config.get("moe") or {}).get("num_experts") or config.get("moe_num_experts"):
        raise CheckpointError(f"{path} is a mixture of experts; give its Hugging Face checkpoint.")


def rank_files(config: dict[str, Any], path: Path) -> list[dict[str, StoredTensor]]:
    """The stored tensors of every rank, under TensorRT-LLM's names.

    Raises CheckpointError for checkpoints that are quantised, or divided by layers.
    """
    quantization = config.get("quantization") or {}
    if quantization.get("quant_algo"):
        raise CheckpointError(
            f"{path} is quantised ({quantization['quant_algo']}); allowed are float32, float16 and bfloat16 checkpoints. "
            "Convert it without quantisation."
        )
    if (config.get("mapping") or {}).get("pp_size", 1) > 1:
        raise CheckpointError(f"{path} is divided by layers (pp_size); convert it with pp_size 1.")
    count = (config.get("mapping") or {}).get("tp_size", 1)
    return [stored_file(path / f"rank{rank}.safetensors") for rank in range(count)]


def hugging_face_name(name: str, config: dict[str, Any]) -> tuple[str, int | None, tuple[int, ...] | None]:
    """(Hugging Face's name, axis divided among ranks, sizes of q, k and v within a rank of a fused tensor)."""
    if name in TOP_NAMES:
        return (*TOP_NAMES[name], None)
    match = re.fullmatch(r"transformer\.layers\.(\d+)\.(.*)", name)
    if match is not None:
        prefix = f"model.layers.{match[1]}"
        for ours, theirs, axis in LAYER_NAMES:
            if match[2] == ours:
                return f"{prefix}.{theirs}", axis, None
        if match[2] in ("attention.qkv.weight", "attention.qkv.bias"):
            return f"{prefix}.self_attn.{match[2].replace('attention.qkv', 'qkv_proj')}", 0, _head_rows(config)
    raise CheckpointError(f"the TensorRT-LLM checkpoint holds '{name}', which furcate does not know.")


def _head_rows(config: dict[str, Any]) -> tuple[int, ...]:
    ranks = (config.get("mapping") or {}).get("tp_size", 1)
    key_heads = max(config["num_key_value_heads"] // ranks, 1)
    return tuple(count * _head_size(config) for count in (config["num_attention_heads"] // ranks, key_heads, key_heads))


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_size") or config["hidden_size"] // config["num_attention_heads"]


def joined(pieces: list[StoredTensor], axis: int | None, sizes: tuple[int, ...] | None) -> StoredTensor:
    """One tensor of the ranks' parts; with `sizes` each rank's q, k and v are put together with the others'."""
    first = pieces[0]
    if axis is None or len(pieces) == 1:
        return first
    shape = list(first.shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    return StoredTensor(tuple(shape), first.dtype, first.file, _loader(pieces, axis, sizes))


def _loader(pieces: list[StoredTensor], axis: int, sizes: tuple[int, ...] | None) -> Callable[[], Tensor]:
    def load() -> Tensor:
        parts = [piece.load() for piece in pieces]
        if sizes is None:
            return torch.cat(parts, dim=axis)
        by_kind = zip(*(part.split(sizes) for part in parts), strict=True)
        return torch.cat([torch.cat(kind) for kind in by_kind])

    return load


def hugging_face_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a decoder as Hugging Face writes it."""
    architecture = config["architecture"]
    if architecture in WITH_HEADS:
        architecture = "Qwen2ForCausalLM" if "qwen" in str(config.get("model_type", "")).lower() else "LlamaForCausalLM"
    scaling = dict(config.get("rotary_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": _head_size(config),
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["norm_epsilon"],
        "hidden_act": config["hidden_act"],
        "attention_bias": bool(config.get("attn_bias", False)) and MODEL_TYPES[architecture] == "llama",
        "rope_parameters": {"rope_type": kind, "rope_theta": config.get("rotary_base", 10000.0), **scaling},
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", config.get("share_embedding_table", False))),
    }
