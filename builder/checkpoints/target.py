"""A target checkpoint, a Hugging Face directory (quantised or not) or a GGUF file, in furcate's named-tensor form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from furcate.builder.checkpoints.families import decoder_spec, token_ids
from furcate.builder.checkpoints.gguf import gguf_model, gguf_tensors, is_gguf
from furcate.builder.checkpoints.layers import IGNORED_BUFFERS, LayerPlan
from furcate.builder.checkpoints.named import NamedTensors, Part, TensorPlan
from furcate.builder.checkpoints.quantised import quantization_of, without_quantisation
from furcate.builder.checkpoints.refusals import refuse_unsupported
from furcate.builder.checkpoints.stored import StoredTensor, read_json, stored_tensors
from furcate.builder.checkpoints.trtllm import is_trtllm, trtllm_target
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# Medusa's merged checkpoints carry their heads beside the target's tensors.
_IGNORED = (*IGNORED_BUFFERS, r"medusa_head\..*")

WEIGHT_ONLY = (
    "the target is quantised: its weights' numbers are kept exactly, activations and K/V cache stay in the engine's dtype. The "
    "torch executor dequantises the weights; TensorRT's plans keep fp8 and int4."
)


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target as `spec` and `weights` (named form, see network/spec.py; read from disk at each access)."""

    spec: DecoderSpec
    weights: Mapping[str, Tensor]
    source_dtype: torch.dtype
    tokenizer_dir: Path | None
    """Directory with the tokenizer's files; None for a GGUF file, whose tokenizer `gguf.gguf_tokenizer` gives."""
    source: Path
    warnings: tuple[str, ...] = ()
    """What its reader had to assume or leave out."""


def read_target(
    path: Path, *, allows_pickle: bool = False, progress: Callable[[str], None] | None = None
) -> TargetCheckpoint:
    """The target in a Hugging Face directory (safetensors, or .bin with `allows_pickle`) or in a GGUF file.

    `progress` is told what is being done, one line at a time. Nothing but names, shapes and dtypes is read before the weights
    are accessed; a GGUF file is dequantised to float32 at once. Raises CheckpointError for anything damaged, incomplete or
    unsupported.
    """
    report = progress or (lambda _: None)
    if is_gguf(path):
        report(f"dequantising {path.name}")
        return _read_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a directory nor a GGUF file; give a model directory or a .gguf file.")
    report(f"reading {path.name}")
    return _read_directory(path, allows_pickle)


def _read_directory(path: Path, allows_pickle: bool) -> TargetCheckpoint:
    if not (path / "config.json").is_file() and any(path.glob("*.gguf")):
        raise CheckpointError(f"{path} has no config.json but GGUF files; give the path of one of them.")
    raw, renamed = trtllm_target(path) if is_trtllm(path) else (read_json(path / "config.json"), None)
    refuse_unsupported(raw, path)
    quantization = quantization_of(path, raw) if renamed is None else None
    config = load_config(path, {**raw, "quantization_config": None})
    eos = _generation_eos(path) or token_ids(config.eos_token_id)
    spec = replace(decoder_spec(config, _architecture(config)), eos_token_ids=eos)
    stored = stored_tensors(path, allows_pickle=allows_pickle) if renamed is None else renamed
    warnings = ()
    if quantization is not None:
        stored, warnings = without_quantisation(stored, path), (WEIGHT_ONLY,)
    spec = replace(spec, is_tied=_is_tied(spec, stored))
    has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
    return TargetCheckpoint(
        spec=spec,
        weights=_plan_target(spec, stored, path),
        source_dtype=stored["model.embed_tokens.weight"].dtype,
        tokenizer_dir=path if has_tokenizer else None,
        source=path,
        warnings=warnings,
    )


def _read_gguf(path: Path) -> TargetCheckpoint:
    model = gguf_model(path)
    refuse_unsupported(model.config.to_dict(), path)
    generation = model.generation_config
    eos = token_ids(None if generation is None else generation.eos_token_id) or token_ids(model.config.eos_token_id)
    spec = replace(decoder_spec(model.config, type(model).__name__), eos_token_ids=eos)
    stored = gguf_tensors(model, path)
    return TargetCheckpoint(
        spec=spec,
        weights=_plan_target(spec, stored, path),
        source_dtype=stored["model.embed_tokens.weight"].dtype,
        tokenizer_dir=None,
        source=path,
    )


def load_config(path: Path, raw: dict[str, Any]) -> PreTrainedConfig:
    """transformers' configuration of a config.json whose model_type is supported; never runs the checkpoint's own code."""
    try:
        return AutoConfig.for_model(**raw)
    # The configuration classes validate themselves and raise several kinds of errors.
    except Exception as error:
        reason = " ".join(str(error).split()).strip("\"'")
        raise CheckpointError(f"{path / 'config.json'} is not a valid configuration: {reason}") from error


def _architecture(config: PreTrainedConfig) -> str:
    return (config.architectures or [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"])[0]


def _generation_eos(path: Path) -> tuple[int, ...]:
    """Chat models often list all their end tokens only in generation_config.json."""
    if not (path / "generation_config.json").is_file():
        return ()
    return token_ids(GenerationConfig(**read_json(path / "generation_config.json")).eos_token_id)


def _is_tied(spec: DecoderSpec, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the embedding is the lm_head too. A stored lm_head that differs wins over the configuration, as in transformers."""
    if not spec.is_tied or "lm_head.weight" not in stored or "model.embed_tokens.weight" not in stored:
        return spec.is_tied
    return torch.equal(stored["lm_head.weight"].load(), stored["model.embed_tokens.weight"].load())


def _plan_target(spec: DecoderSpec, stored: Mapping[str, StoredTensor], source: Path) -> NamedTensors:
    plan = TensorPlan(stored, source)
    plan.add("embed_tokens.weight", Part("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)))
    plan.add("norm.weight", Part("model.norm.weight", (spec.hidden_size,)))
    if not spec.is_tied:
        plan.add("lm_head.weight", Part("lm_head.weight", (spec.vocab_size, spec.hidden_size)))
    for index in range(spec.num_layers):
        _add_layer(LayerPlan(plan, spec, f"layers.{index}", f"model.layers.{index}"))
    return plan.finish((*_IGNORED, r"lm_head\.weight") if spec.is_tied else _IGNORED)


def _add_layer(layer: LayerPlan) -> None:
    layer.add_norm("input_norm", "input_layernorm")
    if layer.spec.has_sandwich_norms:
        layer.add_norm("attention_out_norm", "post_attention_layernorm")
        layer.add_norm("post_norm", "pre_feedforward_layernorm")
        layer.add_norm("mlp_out_norm", "post_feedforward_layernorm")
    else:
        layer.add_norm("post_norm", "post_attention_layernorm")
    layer.add_attention()
    if layer.spec.num_experts is None:
        layer.add_mlp()
    else:
        layer.add_experts(layer.spec.num_experts)
