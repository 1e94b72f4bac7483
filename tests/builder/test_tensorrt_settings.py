"""Builder settings on plans that TensorRT-RTX really builds: refitting, stripped weights, timing cache, progress, few bits."""

from types import SimpleNamespace

import pytest
import torch
from emitted_networks import new_builder, rtx

from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.ops.tensorrt import EmissionSettings, TensorRTOps
from furcate.builder.ops.tensorrt_graph import Graph
from furcate.builder.ops.tensorrt_weights import NamedWeights
from furcate.builder.tensorrt_build import (
    PlanSettings,
    apply_settings,
    build_plan,
    read_timing_cache,
    write_timing_cache,
)
from furcate.builder.tensorrt_networks import EmittedNetwork

ROWS, COLUMNS = 256, 128


def linear_network(weight, dtype=torch.bfloat16):
    """(builder, network) of one linear layer."""
    builder = new_builder(rtx())
    graph = Graph(rtx(), rtx().create_network(builder), dtype)
    x = graph.input("x", dtype, (4, 8, COLUMNS))
    ops = TensorRTOps(graph, NamedWeights(graph, {"l.weight": weight}), EmissionSettings(attention=None))
    graph.mark_output(ops.linear("l", x), "y")
    return builder, EmittedNetwork("linear", graph.network, graph)


def random_weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def quantised(kind: str) -> QuantisedWeight:
    if kind == "int4":
        values = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
        return QuantisedWeight(values, torch.full((ROWS, COLUMNS // 64), 0.01))
    scales = torch.tensor([0.02]) if kind == "fp8" else torch.linspace(0.01, 0.03, ROWS)
    return QuantisedWeight((random_weight() / 0.02).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("kind", ["fp8", "fp8-by-row", "int4"])
def test_a_weight_in_few_bits_is_a_constant_in_these_bits_and_builds(kind):
    builder, network = linear_network(quantised(kind))
    few = len(build_plan(builder, network, [], PlanSettings(arch=120)))
    kinds = [layer.type.name for layer in layers_of(network)]
    stored = {layer.get_output(0).dtype.name for layer in layers_of(network) if layer.type.name == "CONSTANT"}
    assert kinds.count("DEQUANTIZE") == 1
    assert stored == {"INT4" if kind == "int4" else "FP8", "BF16"}
    if kind != "int4":  # TensorRT-RTX 1.7 unpacks int4 constants of a network as small as this one
        whole = len(build_plan(*linear_network(quantised(kind).dequantised()), [], PlanSettings(arch=120)))
        assert whole - few > ROWS * COLUMNS - 16_000


def layers_of(network: EmittedNetwork) -> list:
    return [network.network.get_layer(index) for index in range(network.network.num_layers)]


def test_int4_values_are_signed_and_the_even_column_is_in_the_low_bits():
    values = torch.tensor([[0x71, 0x8F]], dtype=torch.uint8)
    weight = QuantisedWeight(values, torch.tensor([[2.0, 10.0]])).dequantised()
    torch.testing.assert_close(weight, torch.tensor([[2.0, 14.0, -10.0, -80.0]]))


def test_fp8_scales_are_one_or_one_a_row():
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0]]).to(torch.float8_e4m3fn)
    torch.testing.assert_close(QuantisedWeight(values, torch.tensor([2.0])).dequantised(), values.float() * 2)
    by_row = QuantisedWeight(values, torch.tensor([1.0, 10.0])).dequantised()
    torch.testing.assert_close(by_row, torch.tensor([[1.0, 2.0], [30.0, -40.0]]))


def test_settings_become_flags_and_limits():
    # A stripped plan itself cannot be had here: TensorRT-RTX compiles a refittable one on the GPU.
    config = new_builder(rtx()).create_builder_config()
    settings = {
        "strips_weights": True,
        "is_version_compatible": True,
        "workspace_bytes": 1 << 30,
        "optimization_level": 4,
    }
    apply_settings(rtx(), config, PlanSettings(arch=120, **settings))
    flags, trt = rtx().module.BuilderFlag, rtx().module
    wanted = {flags.REFIT_INDIVIDUAL, flags.STRIP_PLAN, flags.VERSION_COMPATIBLE}
    assert {flag for flag in flags.__members__.values() if config.get_flag(flag)} >= wanted
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 30
    assert config.builder_optimization_level == 4
    plain = new_builder(rtx()).create_builder_config()
    apply_settings(rtx(), plain, PlanSettings(arch=120))
    assert not any(plain.get_flag(flag) for flag in wanted)


def test_only_the_checkpoints_weights_can_be_refitted():
    _, network = linear_network(random_weight())
    assert network.graph.weight_names == ["l.weight"]
    network.network.mark_weights_refittable("l.weight")
    assert network.network.are_weights_marked_refittable("l.weight")


class CachingConfig:
    """IBuilderConfig's timing cache: it takes its own format and refuses the rest, as TensorRT does."""

    def __init__(self):
        self.cache = None

    def create_timing_cache(self, content: bytes):
        is_known = content in (b"", b"measured")
        return SimpleNamespace(content=content, serialize=lambda: b"measured") if is_known else None

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self):
        return self.cache


@pytest.mark.parametrize(("kept", "used"), [(None, b""), (b"measured", b"measured"), (b"of another GPU", b"")])
def test_the_timing_cache_is_kept_and_one_that_is_refused_is_replaced(tmp_path, kept, used):
    path, config = tmp_path / "timing.cache", CachingConfig()
    if kept is not None:
        path.write_bytes(kept)
    read_timing_cache(config, path)
    assert config.cache.content == used
    write_timing_cache(config, path)
    assert path.read_bytes() == b"measured"
    assert [file.name for file in tmp_path.iterdir()] == ["timing.cache"]


def test_progress_is_told_phase_by_phase():
    told = []
    build_plan(*linear_network(random_weight()), [], PlanSettings(arch=120), lambda *step: told.append(step))
    assert told, "TensorRT reports phases"
    assert all(0 <= step <= total for _, step, total in told)
    assert {phase for phase, step, total in told if step == total}
