"""The plans of a TensorRT engine: emitted, built one after the other, written beside what they do not hold themselves.

rank<R>.engine      the target's plan of rank R (TensorRT-LLM's name)
rank0.head.engine   the head's layer or heads; rank0.logits.engine its logits, rank0.fuse.engine its fusion of features
rank0.safetensors   tables that several plans share, the draft vocabulary, and with --strip-weights everything
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import WEIGHTS_FILE, Manifest
from furcate.builder.errors import BuildError, ConfigError
from furcate.builder.few_bits import EngineWeights, plain_weights
from furcate.builder.gpus import Gpu, gpu_named
from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.network.rope import rope_table
from furcate.builder.network.spec import DecoderSpec, HeadKind
from furcate.builder.ops.tensorrt_plugin import PluginSettings, registered_plugins
from furcate.builder.ops.tensorrt_versions import TensorRT, installed_tensorrt
from furcate.builder.ops.torch import RopeTables
from furcate.builder.plugin_version import plugin_version
from furcate.builder.tensor_parallel import check_parallel, rank_spec, rank_weights
from furcate.builder.tensorrt_build import GIB, PlanSettings, build_plan
from furcate.builder.tensorrt_config import Binding, TensorRTConfig, TensorRTRecord
from furcate.builder.tensorrt_networks import (
    EMBEDDING,
    LM_HEAD,
    EmissionContext,
    EmittedNetwork,
    emit_head,
    emit_target,
)
from furcate.builder.tensorrt_profiles import Buckets, default_buckets, profiles_of
from furcate.builder.tree_config import TreeKind
from furcate.builder.trtllm_engine import create_builder, save_target, trtllm_builder_module
from furcate.plugins.tree_attention.spec import HEAD_DIMS, RopeTable

DRAFT_POSITIONS = 2 * 128
"""Rows of the rotary table behind the context: draft nodes of a full context still need theirs."""
NUM_SPLITS = {80: 4, 89: 4, 90: 8, 100: 8, 103: 8, 120: 8}
"""Splits of the prefix, fixed in a plan: enough CTAs for one sequence of few KV heads on each architecture. Not yet tuned."""
TORCH_DTYPES = {DataType.BFLOAT16: torch.bfloat16, DataType.FLOAT16: torch.float16}


def check_tensorrt_config(config: BuildConfig) -> Gpu:
    """The GPU of a TensorRT build; raises ConfigError for settings that no plan can have. Needs no TensorRT."""
    gpu, settings = gpu_named(config.tensorrt.gpu), config.tensorrt
    if config.dtype is DataType.FLOAT32:
        raise ConfigError("--dtype is float32; the plugins compute in bfloat16 or float16, so plans need one of these.")
    if settings.hardware_compatible:
        raise ConfigError(
            f"--hardware-compatible cannot be had: the plugins' kernels are compiled for sm_{gpu.arch} alone; leave it out."
        )
    if settings.optimization_level is not None and not 0 <= settings.optimization_level <= 5:
        raise ConfigError(f"--optimization-level is {settings.optimization_level}; allowed are 0 to 5.")
    if settings.workspace_gib is not None and settings.workspace_gib <= 0:
        raise ConfigError(f"--workspace-gib is {settings.workspace_gib}; it must be more than 0.")
    if settings.tp_size < 1:
        raise ConfigError(f"--tp-size is {settings.tp_size}; it must be at least 1.")
    return gpu


def usable_tensorrt(gpu: Gpu) -> TensorRT:
    """The TensorRT of this machine, with a GPU of the wanted architecture. Raises BuildError naming what is missing."""
    tensorrt = installed_tensorrt()
    instead = "--executor torch builds an engine anywhere, and --dry-run prints the memory plan"
    if tensorrt is None:
        raise BuildError(
            "--executor tensorrt needs TensorRT, which cannot be imported here; run this in NVIDIA's container or pip install "
            f"tensorrt on a machine with the GPU ({instead})."
        )
    if not torch.cuda.is_available():
        raise BuildError(
            f"{tensorrt.label} builds plans on the GPU they are for, and there is no usable GPU here; run this on one of "
            f"sm_{gpu.arch} ({instead})."
        )
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor != gpu.arch:
        raise BuildError(
            f"--gpu {gpu.name} is of sm_{gpu.arch}, this machine's GPU is of sm_{10 * major + minor}; build on the GPU that "
            "will serve."
        )
    return tensorrt


def engine_buckets(manifest: Manifest, is_head: bool = False) -> Buckets:
    """The sizes that the target's plans, or the head's, are tuned for.

    The head's passes hold every node drafted so far, which in a dynamic tree are more than are verified.
    """
    pages = -(-(manifest.max_context_tokens + DRAFT_POSITIONS) // manifest.page_size)
    tree, num_nodes = manifest.tree, manifest.tree.budget
    if is_head:
        # What was accepted is read as a chain of as many columns as the deepest path has nodes.
        drafted = tree.top_k * (tree.depth + 1) if tree.kind is TreeKind.DYNAMIC else 0
        num_nodes = max(num_nodes, drafted, tree.max_depth + 1)
    return default_buckets(manifest.max_batch_size, num_nodes, manifest.prefill_chunk_tokens, pages)


def write_plans(
    directory: Path, config: BuildConfig, manifest: Manifest, weights: EngineWeights, progress: Any
) -> Manifest:
    """The manifest with its plans' record, after the plans and rank0.safetensors were written to `directory`."""
    gpu = check_tensorrt_config(config)
    tensorrt = usable_tensorrt(gpu)
    check_parallel(manifest, config.tensorrt.tp_size)
    if manifest.target.head_dim not in HEAD_DIMS:
        raise ConfigError(f"head_dim is {manifest.target.head_dim}; the plugins have kernels for {list(HEAD_DIMS)}.")
    context = emission_context(tensorrt, gpu, manifest, config.tensorrt.tp_size)
    trtllm, route = trtllm_builder_module()
    progress.stage(route)
    builder = create_builder(tensorrt, trtllm)
    settings = plan_settings(config, gpu)
    bindings = {}
    for file, emitted in emit_networks(builder, context, manifest, weights):
        progress.stage(f"building {file}")
        profiles = profiles_of(emitted, engine_buckets(manifest, is_head=emitted.name != "target"))
        plan = build_plan(builder, emitted, profiles, settings, _reporter(progress))
        if emitted.name == "target":
            save_target(directory, manifest, plan, int(file.removeprefix("rank").removesuffix(".engine")), trtllm)
        else:
            (directory / file).write_bytes(plan)
        bindings.setdefault(emitted.name, bindings_of(emitted))
    kept = plain_weights(weights) if config.tensorrt.strip_weights else kept_weights(weights, context)
    save_file(kept, directory / WEIGHTS_FILE)
    return replace(manifest, tensorrt=plan_record(context, config.tensorrt, gpu, bindings))


def emission_context(tensorrt: TensorRT, gpu: Gpu, manifest: Manifest, num_ranks: int) -> EmissionContext:
    """What the plans of an engine share: dtype, paged attention, rotary tables, and the tables that a head borrows."""
    plugins = registered_plugins(gpu.arch)
    attention = PluginSettings(page_size=manifest.page_size, num_splits=NUM_SPLITS[gpu.arch], plugins=plugins)
    return EmissionContext(
        tensorrt=tensorrt,
        dtype=TORCH_DTYPES[manifest.dtype],
        attention=attention,
        rope=rope_tables(manifest, manifest.target),
        num_ranks=num_ranks,
        shared_tables=shared_tables(manifest),
    )


def rope_tables(manifest: Manifest, spec: DecoderSpec) -> RopeTables:
    """The rotary tables of the target, or of the head's own decoder, over the engine's context."""
    num_positions = manifest.max_context_tokens + DRAFT_POSITIONS
    local = None if spec.local_rope is None else RopeTable(*rope_table(spec, num_positions, spec.local_rope))
    return RopeTables(everywhere=RopeTable(*rope_table(spec, num_positions)), local=local)


def shared_tables(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Names and shapes of the target's tables that the head reads too: both plans then take them as inputs.

    The projection of a tied target is its embedding, under that name.
    """
    head, spec = manifest.head, manifest.target
    names = set()
    reads_tokens = head is not None and (head.kind in (HeadKind.EAGLE, HeadKind.EAGLE3) or head.is_grounded)
    if head is not None and reads_tokens and not head.owns_embedding:
        names.add(EMBEDDING)
    if head is not None and not head.owns_lm_head and head.draft_vocab_size == spec.vocab_size:
        names.add(EMBEDDING if spec.is_tied else LM_HEAD)
    return dict.fromkeys(sorted(names), (spec.vocab_size, spec.hidden_size))


def emit_networks(builder: Any, context: EmissionContext, manifest: Manifest, weights: EngineWeights):
    """(file name, emitted network) of every plan, one at a time: constants are freed as soon as a plan is written."""
    target = {name.removeprefix("target."): tensor for name, tensor in weights.items() if name.startswith("target.")}
    head = {
        name.removeprefix("head."): t
        for name, t in weights.items()
        if name.startswith("head.") and isinstance(t, Tensor)
    }
    for rank in range(context.num_ranks):
        spec = rank_spec(manifest.target, context.num_ranks)
        own = rank_weights(manifest.target, target, rank, context.num_ranks)
        yield f"rank{rank}.engine", emit_target(builder, context, spec, own, manifest.feature_layers)
    if manifest.head is not None:
        if manifest.head.decoder is not None:
            context = replace(context, rope=rope_tables(manifest, manifest.head.decoder))
        for emitted in emit_head(builder, context, manifest.head, head_weights(manifest, target, head)):
            yield f"rank0.{emitted.name}.engine", emitted


def head_weights(
    manifest: Manifest, target: Mapping[str, Tensor | QuantisedWeight], head: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The head's weights; with a draft vocabulary, its rows of the target's projection too."""
    own = {name: tensor for name, tensor in head.items() if name != "draft_token_ids"}
    assert manifest.head is not None
    if not manifest.head.owns_lm_head and "draft_token_ids" in head:
        table = target[EMBEDDING if manifest.target.is_tied else LM_HEAD]
        assert isinstance(table, Tensor), "the target's tables are never kept in few bits"
        own[LM_HEAD] = table[head["draft_token_ids"]]
    return own


def kept_weights(weights: EngineWeights, context: EmissionContext) -> dict[str, Tensor]:
    """What no plan holds: the shared tables, under the names of the torch executor's weights, and the draft vocabulary."""
    names = [f"target.{table}" for table in context.shared_tables] + ["head.draft_token_ids"]
    return plain_weights({name: weights[name] for name in names if name in weights})


def plan_settings(config: BuildConfig, gpu: Gpu) -> PlanSettings:
    """TensorRT's builder settings of a build."""
    chosen = config.tensorrt
    cache = chosen.timing_cache or config.output.absolute().parent / f"timing-{gpu.name}.cache"
    return PlanSettings(
        arch=gpu.arch,
        workspace_bytes=None if chosen.workspace_gib is None else int(chosen.workspace_gib * GIB),
        optimization_level=chosen.optimization_level,
        timing_cache=cache,
        is_refittable=chosen.refit,
        strips_weights=chosen.strip_weights,
        is_version_compatible=chosen.version_compatible,
    )


def plan_record(
    context: EmissionContext, settings: TensorRTConfig, gpu: Gpu, bindings: dict[str, tuple[Binding, ...]]
) -> TensorRTRecord:
    """What the manifest keeps of the plans."""
    assert isinstance(context.attention, PluginSettings)
    return TensorRTRecord(
        gpu=gpu.name,
        arch=gpu.arch,
        version=context.tensorrt.version,
        plugin_version=plugin_version(),
        tp_size=context.num_ranks,
        num_splits=context.attention.num_splits,
        is_version_compatible=settings.version_compatible,
        is_refittable=settings.refit or settings.strip_weights,
        is_stripped=settings.strip_weights,
        bindings=bindings,
        shared_tables=tuple(context.shared_tables),
    )


def bindings_of(emitted: EmittedNetwork) -> tuple[Binding, ...]:
    """The network's inputs, then its outputs, in order."""
    network = emitted.network
    inputs = [(network.get_input(index), False) for index in range(network.num_inputs)]
    outputs = [(network.get_output(index), True) for index in range(network.num_outputs)]
    return tuple(
        Binding(name=tensor.name, dtype=tensor.dtype.name, shape=tuple(tensor.shape), is_output=is_output)
        for tensor, is_output in inputs + outputs
    )


def _reporter(progress: Any) -> Any:
    """TensorRT's outermost phases as stages of the build."""

    def report(phase: str, step: int, num_steps: int) -> None:
        if step == 0:
            progress.stage(f"  {phase}", num_steps)
        else:
            progress.advance()

    return report
