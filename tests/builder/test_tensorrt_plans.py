"""What surrounds a plan: profiles, GPUs by name, the memory plan, the dry run, tensor parallelism, and clear refusals."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from furcate.builder.build import build_engine, plan_dry_run
from furcate.builder.config import BuildConfig, DataType, Executor
from furcate.builder.dry_run import dry_run_report
from furcate.builder.engine import read_engine
from furcate.builder.errors import BuildError, ConfigError
from furcate.builder.gpus import GPUS
from furcate.builder.memory_plan import activation_bytes
from furcate.builder.tensor_parallel import rank_spec, rank_weights
from furcate.builder.tensorrt_config import TensorRTConfig
from furcate.builder.tensorrt_profiles import Buckets, all_profiles, default_buckets
from furcate.plugins.chips import CHIPS


def config_of(target, head, tmp_path, *, gpu="h100", **changes) -> BuildConfig:
    own = {name: changes.pop(name) for name in list(changes) if name in TensorRTConfig.__dataclass_fields__}
    return BuildConfig(
        target=target, head=head, output=tmp_path / "engine", executor=Executor.TENSORRT,
        tensorrt=TensorRTConfig(gpu=gpu, **own), **changes,
    )  # fmt: skip


def test_every_batch_and_tree_has_exactly_one_decode_profile():
    buckets = default_buckets(max_batch_size=12, tree_budget=20, prompt_tokens=256, max_pages=9)
    assert buckets.batch_sizes == (1, 4, 8, 12)
    profiles = [profile for profile in all_profiles(buckets) if profile.name.startswith("decode")]
    for batch in range(1, 13):
        for nodes in range(1, 21):
            holding = [
                p.name for p in profiles
                if p.smallest.batch <= batch <= p.largest.batch and p.smallest.nodes <= nodes <= p.largest.nodes
            ]  # fmt: skip
            assert holding == [f"decode-b{buckets.batch_bucket(batch)}-n{buckets.node_bucket(nodes)}"]
    with pytest.raises(ConfigError, match="13 sequences are more than the engine's largest bucket, 12"):
        buckets.batch_bucket(13)


def test_typical_shapes_lie_between_smallest_and_largest():
    for profile in all_profiles(default_buckets(32, 60, 512, 65)):
        for axis in ("batch", "nodes", "rows", "pages"):
            low, middle, high = (getattr(s, axis) for s in (profile.smallest, profile.typical, profile.largest))
            assert 1 <= low <= middle <= high


def test_shapes_follow_the_inputs_declaration():
    shape = all_profiles(Buckets(batch_sizes=(4,), tree_nodes=(33,), prompt_tokens=64, max_pages=7))[0].largest
    assert shape.of("tree_mask", (-1, -1, -1)) == (4, 33, 2)
    assert shape.of("page_table", (-1, -1)) == (4, 7)
    assert shape.of("hidden", (-1, -1, 64)) == (4, 33, 64)
    assert shape.of("k_cache.0", (-1, 2, 128, 16)) == (4, 2, 128, 16)


def test_buckets_that_do_not_ascend_are_refused():
    with pytest.raises(ConfigError, match=r"batch_sizes are \[4, 2\]; give ascending sizes"):
        Buckets(batch_sizes=(4, 2), tree_nodes=(1,), prompt_tokens=1, max_pages=1)


def test_every_named_gpu_has_kernels_and_a_source():
    assert {"h100", "h200", "b200", "rtx-pro-6000"} <= set(GPUS)
    for gpu in GPUS.values():
        assert gpu.arch in CHIPS
        assert 20e9 < gpu.memory_bytes < 300e9
        assert "nvidia.com" in gpu.source


def test_the_memory_plan_counts_every_byte_of_weights_and_cache(tiny_target, tiny_heads, tmp_path):
    run = plan_dry_run(config_of(tiny_target, tiny_heads["eagle3"], tmp_path, max_batch_size=4, max_context_tokens=512))
    build_engine(
        BuildConfig(target=tiny_target, head=tiny_heads["eagle3"], output=tmp_path / "torch", max_batch_size=4)
    )
    engine = read_engine(tmp_path / "torch")
    stored = {f"{prefix}.{name}": t for prefix in ("target", "head") for name, t in engine.weights(prefix).items()}
    assert {name: tuple(t.shape) for name, t in stored.items()} == run.shapes
    assert run.memory.weight_bytes == sum(2 * tensor.numel() for tensor in stored.values())
    # 6 layers of the target and one of the head, K and V, 2 heads of 16, two bytes.
    assert run.memory.bytes_per_sequence == 512 * 7 * 2 * 2 * 16 * 2
    # The scratch page is in it, and room for one tree.
    assert run.memory.pool_bytes == 4 * run.memory.bytes_per_sequence + (16 + 2 * 128) * 7 * 2 * 2 * 16 * 2
    plan = run.memory
    assert plan.left_bytes == plan.usable_bytes - plan.weight_bytes - plan.pool_bytes - plan.activation_bytes


def test_the_activation_estimate_is_above_what_the_largest_tensors_take():
    from furcate.builder.network.spec import DecoderSpec

    llama = DecoderSpec(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_query_heads=32, num_kv_heads=8, head_dim=128, max_positions=8192,
    )  # fmt: skip
    rows = 8 * 64
    logits, gate_up = 4 * rows * 128256, 2 * rows * 2 * 14336
    assert logits + gate_up < activation_bytes(llama, rows, 2, 8) < 2 * (logits + gate_up)


def test_a_pool_larger_than_the_gpu_does_not_fit(tiny_target, tmp_path):
    run = plan_dry_run(config_of(tiny_target, None, tmp_path, max_pool_tokens=10**9))
    assert run.memory.left_bytes < 0


def test_the_dry_run_prints_networks_profiles_and_memory_and_writes_nothing(tiny_target, tiny_heads, tmp_path):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(dry_run_report(plan_dry_run(config_of(tiny_target, tiny_heads["medusa"], tmp_path, gpu="b200"))))
    text = console.export_text()
    for words in (
        "networks for b200 (sm_100)",
        "decode-b1-n1 ",
        "prompt-n256",
        "weights",
        "K/V pool",
        "activations",
        "left",
    ):
        assert words in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_tensorrt_one_sentence_says_what_is_missing_and_what_to_run_instead(tiny_target, tmp_path):
    with pytest.raises(BuildError) as error:
        build_engine(config_of(tiny_target, None, tmp_path))
    text = str(error.value)
    assert "\n" not in text
    assert "NVIDIA's container" in text or "no usable GPU here" in text
    assert "--executor torch" in text
    assert "--dry-run" in text
    assert list(tmp_path.iterdir()) == []


REFUSALS = [
    ({"gpu": None}, "--gpu is missing; allowed are a100-40gb"),
    ({"gpu": "h300"}, "--gpu is 'h300'; allowed are a100-40gb"),
    ({"dtype": DataType.FLOAT32}, "--dtype is float32; the plugins compute in bfloat16 or float16"),
    (
        {"hardware_compatible": True},
        "--hardware-compatible cannot be had: the plugins' kernels are compiled for sm_90 alone",
    ),
    ({"optimization_level": 9}, "--optimization-level is 9; allowed are 0 to 5"),
    ({"workspace_gib": 0.0}, "--workspace-gib is 0.0; it must be more than 0"),
    ({"tp_size": 0}, "--tp-size is 0; it must be at least 1"),
    ({"tp_size": 4}, "--tp-size is 4; it must divide the target's 2 K/V heads"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_settings_that_no_plan_can_have_are_refused(tiny_target, tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as error:
        plan_dry_run(config_of(tiny_target, None, tmp_path, **changes))
    assert sentence in str(error.value)


def test_settings_of_plans_are_refused_for_the_torch_executor(tiny_target, tmp_path):
    config = replace(config_of(tiny_target, None, tmp_path), executor=Executor.TORCH)
    with pytest.raises(ConfigError, match="need --executor tensorrt beside them"):
        build_engine(config)


def test_ranks_together_compute_what_one_computes(tiny_target):
    from furcate.builder.checkpoints.target import read_target

    target = read_target(tiny_target)
    spec, weights = target.spec, {name: target.weights[name] for name in target.weights}
    assert rank_spec(spec, 2).num_kv_heads == 1
    parts = [rank_weights(spec, weights, rank, 2) for rank in range(2)]
    x = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    gate_up, down = weights["layers.0.gate_up.weight"], weights["layers.0.down.weight"]

    def mlp(up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate, value = (x @ up.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * value) @ out.T

    summed = sum(mlp(part["layers.0.gate_up.weight"], part["layers.0.down.weight"]) for part in parts)
    torch.testing.assert_close(summed, mlp(gate_up, down))
    # Rank r has query heads 2r, 2r + 1 and KV head r of the four and two.
    qkv, own = (
        weights["layers.0.qkv.weight"].unflatten(0, (8, 16)),
        parts[1]["layers.0.qkv.weight"].unflatten(0, (4, 16)),
    )
    torch.testing.assert_close(own, qkv[[2, 3, 5, 7]])
    torch.testing.assert_close(parts[1]["layers.0.o.weight"], weights["layers.0.o.weight"][:, 32:])
    assert parts[0]["embed_tokens.weight"] is weights["embed_tokens.weight"]


def test_the_manifest_of_a_torch_engine_knows_nothing_of_plans(tiny_engine):
    assert "tensorrt" not in json.loads((Path(tiny_engine("medusa")) / "manifest.json").read_text())
