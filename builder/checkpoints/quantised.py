"""Quantised checkpoints under plain names: every module's stored parts become one tensor, dequantised when it is read.

Read are fp8 and int4 weights in the layouts of
modelopt            github.com/NVIDIA/Model-Optimizer, modelopt/torch/export: FP8 (`weight` float8_e4m3, `weight_scale` []),
                    FP8 per channel (`weight_scale` [out]), by blocks, W4A16_AWQ (`weight` uint8 [out / 2, in], two rows a byte,
                    `weight_scale` [out, in / block], `pre_quant_scale` [in] that the layer's input is multiplied by)
compressed-tensors  github.com/vllm-project/compressed-tensors: float-quantized (`weight` float8_e4m3, `weight_scale` [1], [out, 1]
                    or by blocks), pack-quantized (`weight_packed` int32 [out, in / 8], value + 8, the first column lowest;
                    `weight_scale` [out, groups], `weight_zero_point`, `weight_g_idx`, `weight_shape`)
fp8                 transformers' own: `weight` float8_e4m3, `weight_scale_inv` by blocks
Scales of activations and of K/V caches are not used: both stay in the engine's dtype, which is the more exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furcate.builder.checkpoints.quantised_layouts import (
    block_scaled,
    fp8_weight,
    packed_rows,
    unpacked_columns,
)
from furcate.builder.checkpoints.stored import StoredTensor, read_json
from furcate.builder.errors import CheckpointError
from furcate.builder.network.quantised import QuantisedWeight, packed_int4

MODELOPT_FILE = "hf_quant_config.json"
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PC_PT", "FP8_PB_WO", "W4A16_AWQ", "INT4_AWQ")
COMPRESSED_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized")
METHODS = ("modelopt", "compressed-tensors", "fp8")
_UNUSED = (
    "input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "input_zero_point", "weight_shape",
)  # fmt: skip
"""Scales of activations and caches, and what a shape says anyway."""
_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx", "pre_quant_scale",
)  # fmt: skip


def quantization_of(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The checkpoint's quantisation settings, from config.json or modelopt's own file; None where it has none.

    Raises CheckpointError for a method that is not read, naming those that are.
    """
    settings = config.get("quantization_config")
    if not settings and (directory / MODELOPT_FILE).is_file():
        settings = {"quant_method": "modelopt", **(read_json(directory / MODELOPT_FILE).get("quantization") or {})}
    if not settings:
        return None
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else str(settings)
    if method not in METHODS:
        raise CheckpointError(
            f"{directory} is quantised ({method}); read are fp8 and int4 weights of modelopt and compressed-tensors, "
            "GGUF files, and float32, float16 and bfloat16. Dequantise it first."
        )
    _refuse_other_formats(settings, method, directory)
    return settings


def _refuse_other_formats(settings: dict[str, Any], method: str, directory: Path) -> None:
    if method == "modelopt":
        algorithm = settings.get("quant_algo") or (settings.get("quantization") or {}).get("quant_algo")
        allowed, found = MODELOPT_ALGORITHMS, str(algorithm)
    elif method == "compressed-tensors":
        allowed, found = COMPRESSED_FORMATS, str(settings.get("format"))
    else:
        return
    if found not in allowed:
        raise CheckpointError(
            f"{directory} is quantised by {method} as {found}; read are {', '.join(allowed)}. Quantise it as one of these."
        )


@dataclass(frozen=True)
class _Module:
    """The stored parts of one quantised linear layer, by their last name."""

    name: str
    parts: dict[str, StoredTensor]

    @property
    def main(self) -> StoredTensor:
        """The part that holds the values."""
        return self.parts.get("weight_packed") or self.parts["weight"]

    def load(self, part: str) -> Tensor | None:
        """A part's values; None where there is no such part."""
        stored = self.parts.get(part)
        return None if stored is None else stored.load()


def without_quantisation(stored: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """The checkpoint as if it were not quantised: `<module>.weight` float32 [out, in], what it was made of gone.

    A tensor's `load_quantised` gives the weight in its few bits where the format is one that plans keep.
    Raises CheckpointError for parts that do not belong together.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    plain: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in _UNUSED:
            continue
        is_scaled = f"{module}.weight_scale" in stored or f"{module}.weight_scale_inv" in stored
        if part in _PARTS and is_scaled:
            modules.setdefault(module, {})[part] = tensor
        else:
            plain[name] = tensor
    for name, parts in modules.items():
        module = _Module(name, parts)
        plain[f"{name}.weight"] = _weight(module, directory)
    return plain


def _weight(module: _Module, directory: Path) -> StoredTensor:
    if "weight" not in module.parts and "weight_packed" not in module.parts:
        raise CheckpointError(f"{directory}: '{module.name}' has scales but no weight; download the checkpoint again.")
    main = module.main
    if len(main.shape) != 2:
        raise CheckpointError(
            f"{main.file}: '{module.name}' is quantised as {list(main.shape)}; read are [out, in] weights."
        )
    rows, columns = main.shape
    shape = (rows, columns)
    if main.dtype == torch.float8_e4m3fn:
        make = _fp8
    elif main.dtype == torch.uint8:
        shape = (2 * rows, columns)
        make = _modelopt_int4
    elif main.dtype == torch.int32:
        shape = _packed_shape(module, directory)
        make = _compressed_int4
    else:
        raise CheckpointError(
            f"{main.file}: '{module.name}' is quantised to {str(main.dtype).removeprefix('torch.')}; read are float8_e4m3fn, and "
            "int4 in uint8 (modelopt) or int32 (compressed-tensors)."
        )

    def load() -> Tensor:
        weight = make(module, shape)
        return weight.dequantised() if isinstance(weight, QuantisedWeight) else weight

    def load_quantised() -> QuantisedWeight | None:
        weight = make(module, shape)
        return weight if isinstance(weight, QuantisedWeight) else None

    return StoredTensor(shape, torch.float32, main.file, load, load_quantised, _bits_per_weight(module, shape))


def _bits_per_weight(module: _Module, shape: tuple[int, int]) -> float | None:
    """Of what a plan keeps, by the rules of the loaders below; None where that is a plain weight."""
    scale = module.parts.get("weight_scale") or module.parts["weight_scale_inv"]
    num_scales = math.prod(scale.shape)
    is_fp8 = module.main.dtype == torch.float8_e4m3fn
    if any(part in module.parts for part in ("pre_quant_scale", "weight_zero_point", "weight_g_idx")):
        return None
    if is_fp8 and num_scales not in (1, shape[0]):
        return None
    return (8 if is_fp8 else 4) + 16 * num_scales / math.prod(shape)


def _packed_shape(module: _Module, directory: Path) -> tuple[int, int]:
    """[out, in] of int4 packed into int32: eight columns each, the last word perhaps not full."""
    scale = module.parts.get("weight_scale")
    rows, words = module.main.shape
    columns = 8 * words
    if scale is None or len(scale.shape) != 2 or scale.shape[0] != rows or columns % scale.shape[1]:
        raise CheckpointError(
            f"{directory}: '{module.name}' is packed as {[rows, words]}, which its scales {scale and list(scale.shape)} do not "
            "fit; read are four bits a weight, in groups or by channel."
        )
    return rows, columns


def _fp8(module: _Module, shape: tuple[int, int]) -> QuantisedWeight | Tensor:
    values, scale = module.load("weight"), module.load("weight_scale")
    inverse = module.load("weight_scale_inv")
    assert values is not None
    scale = inverse if scale is None else scale
    assert scale is not None, "a module is quantised because it has a scale"
    before = module.load("pre_quant_scale")
    weight = fp8_weight(values, scale) if scale.numel() in (1, shape[0]) else block_scaled(values, scale, module.name)
    return _folded(weight, before)


def _modelopt_int4(module: _Module, shape: tuple[int, int]) -> QuantisedWeight | Tensor:
    packed, scale = module.load("weight"), module.load("weight_scale")
    assert packed is not None and scale is not None
    weight = QuantisedWeight(packed_int4(packed_rows(packed)), scale.float().view(shape[0], -1))
    return _folded(weight, module.load("pre_quant_scale"))


def _compressed_int4(module: _Module, shape: tuple[int, int]) -> QuantisedWeight | Tensor:
    packed, scale = module.load("weight_packed"), module.load("weight_scale")
    zero, groups = module.load("weight_zero_point"), module.load("weight_g_idx")
    assert packed is not None and scale is not None
    values, scale = unpacked_columns(packed), scale.float()
    if groups is not None and bool((groups < 0).any()):
        groups = None  # written, but never set: the columns are in order
    if zero is None and groups is None:
        return QuantisedWeight(packed_int4(values), scale)
    # Asymmetric, or columns in another order than their groups: no format of a plan, but plain numbers.
    offset = torch.zeros_like(scale) if zero is None else _zero_points(zero, shape[0])
    if groups is None:
        groups = torch.arange(shape[1]) // (shape[1] // scale.shape[1])
    return (values.float() - offset[:, groups.long()]) * scale[:, groups.long()]


def _zero_points(stored: Tensor, num_rows: int) -> Tensor:
    """float32 [out, groups]; stored as they are, or packed eight rows a word."""
    if stored.shape[0] == num_rows:
        return stored.float()
    return unpacked_columns(stored.T.contiguous()).T[:num_rows].float()


def _folded(weight: QuantisedWeight | Tensor, before: Tensor | None) -> QuantisedWeight | Tensor:
    """The weight that reads the layer's unscaled input: AWQ's scale of input columns multiplied in."""
    if before is None:
        return weight
    dense = weight.dequantised() if isinstance(weight, QuantisedWeight) else weight
    return dense * before.float()
