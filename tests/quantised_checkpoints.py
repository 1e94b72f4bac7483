"""Quantised copies of a Hugging Face checkpoint, written by the rules of modelopt, compressed-tensors and transformers.

The packing is done here word by word and byte by byte, apart from the code that unpacks it. A copy comes with the plain weights
that its numbers stand for.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
FP8_MAX = 448.0
Parts = dict[str, Tensor]


def to_fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 values, the plain weight they stand for)."""
    values = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values, values.float() * scale


def to_int4(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(int8 values in [-8, 7], the plain weight), with a scale, and a zero point, for each group of columns."""
    spread = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
    offset = torch.zeros_like(spread) if zero is None else zero.repeat_interleave(weight.shape[1] // zero.shape[1], 1)
    values = (weight / spread + offset).round().clamp(-8, 7)
    return values.to(torch.int8), (values - offset) * spread


def group_scales(weight: Tensor) -> Tensor:
    """float32 [out, in / GROUP]."""
    return weight.view(len(weight), -1, GROUP).abs().amax(-1) / 7


def words_of(values: Tensor) -> Tensor:
    """compressed-tensors' pack_to_int32: eight columns a word, value + 8, the first column in the lowest bits."""
    rows, columns = values.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for column in range(columns):
        words[:, column // 8] |= (values[:, column].long() + 8) << (4 * (column % 8))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def bytes_of(values: Tensor) -> Tensor:
    """modelopt's pack_int4_in_uint8: two rows a byte, the even one in the low four bits."""
    rows, columns = values.shape
    packed = torch.zeros(rows // 2, columns, dtype=torch.uint8)
    for row in range(rows):
        packed[row // 2] |= ((values[row].long() & 15) << (4 * (row % 2))).to(torch.uint8)
    return packed


def modelopt_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().max() / FP8_MAX
    values, plain = to_fp8(weight, scale)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, plain


def modelopt_fp8_blocks(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.view(len(weight) // GROUP, GROUP, -1, GROUP).abs().amax((1, 3)) / FP8_MAX
    values, plain = to_fp8(weight, scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1))
    return {"weight": values, "weight_scale": scale[:, None, :, None].contiguous()}, plain


def modelopt_awq(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = group_scales(weight)
    values, plain = to_int4(weight, scale)
    return {"weight": bytes_of(values), "weight_scale": scale}, plain


def modelopt_awq_scaled(weight: Tensor) -> tuple[Parts, Tensor]:
    parts, plain = modelopt_awq(weight)
    before = torch.linspace(0.5, 2.0, weight.shape[1])
    return {**parts, "pre_quant_scale": before}, plain * before


def compressed_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    values, plain = to_fp8(weight, scale)
    return {"weight": values, "weight_scale": scale}, plain


def compressed_int4(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = group_scales(weight)
    values, plain = to_int4(weight, scale)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words_of(values), "weight_scale": scale, "weight_shape": shape}, plain


def compressed_int4_asymmetric(weight: Tensor) -> tuple[Parts, Tensor]:
    """With zero points, packed along the rows."""
    scale = group_scales(weight)
    zero = torch.arange(scale.numel()).view(scale.shape) % 5 - 2.0
    values, plain = to_int4(weight, scale, zero)
    packed_zero = words_of(zero.T.to(torch.int8)).T.contiguous()
    parts = {"weight_packed": words_of(values), "weight_scale": scale, "weight_zero_point": packed_zero}
    return {**parts, "weight_shape": torch.tensor(weight.shape)}, plain


def compressed_int4_ordered(weight: Tensor) -> tuple[Parts, Tensor]:
    """With activation order: column c is of group g_idx[c]."""
    groups = torch.arange(weight.shape[1]).flip(0) // GROUP
    scale = group_scales(weight)
    values = (weight / scale[:, groups]).round().clamp(-8, 7)
    parts = {"weight_packed": words_of(values.to(torch.int8)), "weight_scale": scale, "weight_g_idx": groups.int()}
    return {**parts, "weight_shape": torch.tensor(weight.shape)}, values * scale[:, groups]


def transformers_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    parts, plain = modelopt_fp8_blocks(weight)
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"].squeeze()}, plain


GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head"]}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", **GROUPS}
LAYOUTS: dict[str, tuple[Callable[[Tensor], tuple[Parts, Tensor]], dict]] = {
    "modelopt-fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-fp8-blocks": (modelopt_fp8_blocks, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}),
    "modelopt-awq": (modelopt_awq, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
    "modelopt-awq-scaled": (modelopt_awq_scaled, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
    "compressed-fp8": (compressed_fp8, {"quant_method": "compressed-tensors", "format": "float-quantized", **GROUPS}),
    "compressed-int4": (compressed_int4, INT4),
    "compressed-int4-asymmetric": (compressed_int4_asymmetric, INT4),
    "compressed-int4-ordered": (compressed_int4_ordered, INT4),
    "transformers-fp8": (transformers_fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
}


def quantise(source: Path, output: Path, layout: str, *, has_own_file: bool = False) -> tuple[Path, Path]:
    """(the quantised copy, a plain copy of the same numbers). `has_own_file`: as modelopt wrote its settings at first."""
    make, settings = LAYOUTS[layout]
    quantised, plain = output / "quantised", output / "plain"
    for copy in (quantised, plain):
        shutil.copytree(source, copy)
    stored, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        if part == "weight" and tensor.ndim == 2 and module.startswith("model.layers"):
            parts, values[name] = make(tensor.float())
            stored |= {f"{module}.{part}": value.clone() for part, value in parts.items()}
            if module.endswith("k_proj"):
                stored[f"{module}.k_scale"] = torch.tensor(1.0)
        else:
            stored[name] = values[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, quantised / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, plain / "model.safetensors")
    if has_own_file:
        content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": settings["quant_algo"]}}
        (quantised / "hf_quant_config.json").write_text(json.dumps(content))
    else:
        file = quantised / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    return quantised, plain
