"""Quantised targets: every layout gives the numbers it was written with, plans keep the bits, and odd ones are refused.

Dequantising is one product in float32 on both sides: equal to the last bit but for the block formats' order of factors.
"""

import json

import pytest
import torch
from quantised_checkpoints import LAYOUTS, quantise
from safetensors.torch import load_file, save_file

from furcate.builder.build import build_engine, plan_dry_run
from furcate.builder.checkpoints.named import NamedTensors
from furcate.builder.checkpoints.target import WEIGHT_ONLY, read_target
from furcate.builder.config import BuildConfig, DataType, Executor
from furcate.builder.engine import read_engine
from furcate.builder.errors import CheckpointError, ConfigError
from furcate.builder.network.quantised import stacked
from furcate.builder.tensor_parallel import rank_spec, rank_weights
from furcate.builder.tensorrt_config import TensorRTConfig

KEPT = {"modelopt-fp8": "fp8", "compressed-fp8": "fp8", "modelopt-awq": "int4", "compressed-int4": "int4"}
"""Layouts that a plan keeps as they are; the others have no format there and become plain weights."""
QKV = "layers.0.qkv.weight"


def close(found, expected) -> None:
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_target_is_the_numbers_it_stands_for(layout, tiny_target, tmp_path):
    quantised, plain = quantise(tiny_target, tmp_path, layout)
    found, expected = read_target(quantised), read_target(plain)
    assert found.spec == expected.spec
    assert set(found.weights) == set(expected.weights)
    for name in expected.weights:
        close(found.weights[name].float(), expected.weights[name].float())
    assert found.warnings == (WEIGHT_ONLY,)
    assert expected.warnings == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_keep_the_bits_where_they_have_a_format_for_them(layout, tiny_target, tmp_path):
    quantised, plain = quantise(tiny_target, tmp_path, layout)
    weights, expected = read_target(quantised).weights, read_target(plain).weights
    assert isinstance(weights, NamedTensors)
    assert weights.quantised("norm.weight") is None
    for name in (QKV, "layers.3.o.weight", "layers.5.gate_up.weight", "layers.5.down.weight"):
        kept = weights.quantised(name)
        assert (None if kept is None else "int4" if kept.is_int4 else "fp8") == KEPT.get(layout)
        bits = weights.bits_per_weight(name)
        assert (bits is None) == (kept is None), "what the memory plan counts is what is kept"
        if kept is not None:
            close(kept.dequantised(), expected[name])
            assert kept.shape == expected[name].shape
            assert kept.num_bytes <= expected[name].numel() * bits / 8 + 2 * len(expected[name])


def test_modelopts_own_file_says_the_same_as_config_json(tiny_target, tmp_path):
    quantised, plain = quantise(tiny_target, tmp_path, "modelopt-fp8", has_own_file=True)
    close(read_target(quantised).weights[QKV], read_target(plain).weights[QKV])


def test_the_torch_executors_engine_holds_the_dequantised_weights(tiny_target, tmp_path):
    quantised, plain = quantise(tiny_target, tmp_path, "compressed-int4")
    engines = {}
    for path in (quantised, plain):
        output = tmp_path / f"{path.name}-engine"
        result = build_engine(BuildConfig(target=path, output=output, dtype=DataType.FLOAT32))
        engines[path] = read_engine(output).weights("target")
        assert result.manifest.weight_format is None
        assert result.warnings == ((WEIGHT_ONLY,) if path is quantised else ())
    for name, tensor in engines[plain].items():
        close(engines[quantised][name], tensor)


def test_the_memory_plan_counts_the_bits(tiny_target, tmp_path):
    def weight_bytes(path) -> int:
        config = BuildConfig(
            target=path, output=tmp_path / "out", executor=Executor.TENSORRT, tensorrt=TensorRTConfig(gpu="h100")
        )
        return plan_dry_run(config).memory.weight_bytes

    quantised, plain = quantise(tiny_target, tmp_path, "modelopt-awq")
    layers = {name: t for name, t in read_target(plain).weights.items() if name.startswith("layers.") and t.ndim == 2}
    saved = sum(tensor.numel() for tensor in layers.values()) * (16 - (4 + 16 / 16)) / 8
    assert weight_bytes(plain) - weight_bytes(quantised) == pytest.approx(saved, abs=len(layers))


def test_plans_of_a_quantised_target_cannot_be_refitted(tiny_target, tmp_path):
    from furcate.builder.few_bits import check_few_bits

    quantised, _ = quantise(tiny_target, tmp_path, "modelopt-fp8")
    config = BuildConfig(
        target=quantised,
        output=tmp_path / "out",
        executor=Executor.TENSORRT,
        tensorrt=TensorRTConfig(gpu="h100", refit=True),
    )
    with pytest.raises(ConfigError, match="--refit and --strip-weights do not go with the quantised target"):
        check_few_bits(config, read_target(quantised))


@pytest.mark.parametrize("layout", KEPT)
def test_ranks_share_the_bits_as_they_share_the_numbers(layout, tiny_target, tmp_path):
    quantised, plain = quantise(tiny_target, tmp_path, layout)
    target, expected = read_target(quantised), read_target(plain)
    assert isinstance(target.weights, NamedTensors)
    names = [QKV, "layers.0.o.weight", "layers.0.gate_up.weight", "layers.0.down.weight"]
    bits = {name: target.weights.quantised(name) for name in names}
    numbers = {name: expected.weights[name] for name in names}
    assert rank_spec(target.spec, 2).num_kv_heads == 1
    for rank in range(2):
        few, many = (rank_weights(target.spec, weights, rank, 2) for weights in (bits, numbers))
        for name in names:
            close(few[name].dequantised(), many[name])


def test_a_border_inside_a_block_makes_plain_numbers(tiny_target, tmp_path):
    """down has 96 columns, six blocks of 16: four ranks would cut blocks."""
    quantised, plain = quantise(tiny_target, tmp_path, "compressed-int4")
    weights = read_target(quantised).weights
    assert isinstance(weights, NamedTensors)
    name = "layers.0.down.weight"
    part = rank_weights(read_target(plain).spec, {name: weights.quantised(name)}, 1, 4)[name]
    close(part, read_target(plain).weights[name][:, 24:48])


def test_parts_of_different_formats_are_not_stacked(tiny_target, tmp_path):
    weights = []
    for layout in ("modelopt-fp8", "modelopt-awq"):
        quantised, _ = quantise(tiny_target, tmp_path / layout, layout)
        found = read_target(quantised).weights
        assert isinstance(found, NamedTensors)
        weights.append(found.quantised("layers.0.o.weight"))
    assert stacked(weights) is None


REFUSALS = [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"by modelopt as NVFP4; read are FP8, "),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "by compressed-tensors as marlin-24; read are float-quantized"),
    ({"quant_method": "bitsandbytes"}, r"is quantised \(bitsandbytes\); read are fp8 and int4 weights of modelopt"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), REFUSALS)
def test_other_formats_are_refused_by_name(settings, sentence, tiny_target, tmp_path):
    quantised, _ = quantise(tiny_target, tmp_path, "modelopt-fp8")
    file = quantised / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    with pytest.raises(CheckpointError, match=sentence):
        read_target(quantised)


def change(directory, name, tensor) -> None:
    stored = load_file(directory / "model.safetensors")
    stored.pop(name, None)
    save_file(stored | ({} if tensor is None else {name: tensor}), directory / "model.safetensors")


def test_damaged_parts_are_refused_by_name(tiny_target, tmp_path):
    module = "model.layers.1.self_attn.o_proj"
    quantised, _ = quantise(tiny_target, tmp_path / "a", "compressed-int4")
    change(quantised, f"{module}.weight_scale", torch.ones(64, 3))
    with pytest.raises(
        CheckpointError, match=rf"'{module}' is packed as \[64, 8\], which its scales \[64, 3\] do not fit"
    ):
        read_target(quantised)
    change(quantised, f"{module}.weight_scale", torch.ones(64, 4))
    change(quantised, f"{module}.weight_packed", None)
    with pytest.raises(CheckpointError, match=f"'{module}' has scales but no weight"):
        read_target(quantised)
    quantised, _ = quantise(tiny_target, tmp_path / "b", "modelopt-fp8")
    change(quantised, f"{module}.weight", torch.zeros(64, 64, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=f"'{module}' is quantised to int8; read are float8_e4m3fn, and int4"):
        read_target(quantised)
