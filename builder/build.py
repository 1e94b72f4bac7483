"""Builds an engine directory from a target and a head."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from furcate.builder.acceptance_config import can_adapt, resolve_acceptance
from furcate.builder.checkpoints.drafter import read_drafter
from furcate.builder.checkpoints.heads import HeadCheckpoint
from furcate.builder.checkpoints.named import shapes_of
from furcate.builder.checkpoints.target import TargetCheckpoint, read_target
from furcate.builder.checkpoints.tokenizer import save_tokenizer
from furcate.builder.config import BuildConfig, DataType, Executor
from furcate.builder.dry_run import DryRun
from furcate.builder.engine import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    file_hash,
    head_prefix,
    installed_versions,
)
from furcate.builder.errors import ConfigError
from furcate.builder.few_bits import (
    EngineWeights,
    bits_per_weight,
    check_few_bits,
    kept_in_few_bits,
    plain_weights,
    weight_format,
)
from furcate.builder.merged_tree_config import parse_trees
from furcate.builder.network.spec import HeadSpec
from furcate.builder.staging import check_output, staged
from furcate.builder.tensor_parallel import check_parallel
from furcate.builder.tensorrt_config import TensorRTConfig
from furcate.builder.tensorrt_engine import check_tensorrt_config, usable_tensorrt, write_plans
from furcate.builder.tree_config import MAX_TREE_NODES, TreeConfig
from furcate.builder.trtllm_config import trtllm_config

DTYPES = {DataType.FLOAT32: torch.float32, DataType.BFLOAT16: torch.bfloat16, DataType.FLOAT16: torch.float16}
PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_DRAFT_VOCABULARY = 24576


@dataclass(frozen=True)
class BuildResult:
    """What a build made, for its closing summary."""

    path: Path
    manifest: Manifest
    num_bytes: int
    warnings: tuple[str, ...]


class Progress:
    """What a build tells while it works. This one is silent; the command line draws bars."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A new stage begins, of `total` units where that is known."""

    def advance(self, amount: int = 1) -> None:
        """`amount` units of the stage are done."""


def build_engine(config: BuildConfig, progress: Progress | None = None) -> BuildResult:
    """Builds the engine of `config.output`. All checks come before anything is written; the output appears whole or not at all.

    Raises ConfigError, CheckpointError or BuildError.
    """
    progress = progress or Progress()
    _check_config(config)
    if config.executor is Executor.TENSORRT:
        usable_tensorrt(check_tensorrt_config(config))
    check_output(config.output, may_replace=config.overwrite)
    target = read_target(config.target, allows_pickle=config.allow_pickle, progress=progress.stage)
    check_few_bits(config, target)
    if config.head:
        progress.stage("reading head")
    heads = _read_heads(config, target)
    tree = parse_trees(config.tree, [head.spec for head in heads])
    resolve_acceptance(
        config.acceptance, tree, heads[0].spec.kind if heads else None
    )  # refused before anything is written
    with staged(config.output) as directory:
        weights, head_specs = _engine_weights(config, target, heads, progress)
        if config.executor is Executor.TORCH:
            progress.stage("writing weights")
            save_file(plain_weights(weights), directory / WEIGHTS_FILE)
        has_chat_template = save_tokenizer(target, directory / "tokenizer")
        manifest = _manifest(config, target, heads, tree, has_chat_template)
        if heads:
            manifest = replace(manifest, head=head_specs[0], more_heads=tuple(head_specs[1:]))
        manifest = replace(manifest, weight_format=weight_format(weights.values()))
        if config.executor is Executor.TENSORRT:
            manifest = write_plans(directory, config, manifest, weights, progress)
        (directory / "config.json").write_text(json.dumps(trtllm_config(manifest), indent=2))
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        progress.stage("hashing", sum(path.stat().st_size for path in files))
        hashes = {str(path.relative_to(directory)): file_hash(path, progress.advance) for path in files}
        manifest = replace(manifest, files=hashes)
        (directory / MANIFEST_FILE).write_text(manifest.to_json())
    num_bytes = sum(path.stat().st_size for path in config.output.rglob("*") if path.is_file())
    warnings = tuple(warning for checkpoint in (target, *heads) for warning in checkpoint.warnings)
    return BuildResult(config.output, manifest, num_bytes, warnings)


def _read_heads(config: BuildConfig, target: TargetCheckpoint) -> list[HeadCheckpoint]:
    return [read_drafter(path, target=target, allows_pickle=config.allow_pickle) for path in config.head]


def plan_dry_run(config: BuildConfig) -> DryRun:
    """What a TensorRT build of `config` would make, read from names and shapes alone; nothing is written.

    Raises ConfigError or CheckpointError.
    """
    _check_config(config)
    gpu = check_tensorrt_config(config)
    target = read_target(config.target, allows_pickle=config.allow_pickle)
    heads = _read_heads(config, target)
    tree = parse_trees(config.tree, [head.spec for head in heads])
    manifest = _manifest(config, target, heads, tree, has_chat_template=False)
    check_parallel(manifest, config.tensorrt.tp_size)
    shapes = {f"target.{name}": shape for name, shape in shapes_of(target.weights).items()}
    for head in heads:
        shapes |= {f"head.{name}": shape for name, shape in shapes_of(head.weights).items()}
        if not head.spec.owns_lm_head:
            shapes["head.lm_head.weight"] = (_draft_size(config, head.spec.vocab_size), target.spec.hidden_size)
    bits = {f"target.{name}": value for name, value in bits_per_weight(target).items()}
    return DryRun(manifest=manifest, gpu=gpu, tp_size=config.tensorrt.tp_size, shapes=shapes, bits=bits)


def _draft_size(config: BuildConfig, vocab_size: int) -> int:
    """Tokens that a head without a vocabulary of its own may propose."""
    wanted = DEFAULT_DRAFT_VOCABULARY if config.draft_vocabulary is None else config.draft_vocabulary
    return min(wanted, vocab_size)


def _check_config(config: BuildConfig) -> None:
    for name in ("max_batch_size", "max_context_tokens", "prefill_chunk_tokens"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if config.prefill_chunk_tokens > 512:
        raise ConfigError(f"--prefill-chunk-tokens is {config.prefill_chunk_tokens}; at most 512 are allowed.")
    if config.page_size not in PAGE_SIZES:
        raise ConfigError(f"--page-size is {config.page_size}; allowed are {', '.join(map(str, PAGE_SIZES))}.")
    if config.max_pool_tokens is not None and config.max_pool_tokens < config.page_size:
        raise ConfigError(
            f"--max-pool-tokens is {config.max_pool_tokens}; it must hold at least one page of {config.page_size}."
        )
    if config.repository is not None and config.repository.absolute() == config.output.absolute():
        raise ConfigError(f"--repository and --output are both {config.output}; give each its own directory.")
    if config.executor is Executor.TENSORRT and len(config.head) > 1:
        raise ConfigError(
            f"--head was given {len(config.head)} times, and --executor tensorrt takes one; give one, or --executor torch."
        )
    if config.executor is not Executor.TENSORRT and (config.dry_run or config.tensorrt != TensorRTConfig()):
        raise ConfigError(
            "--gpu, --dry-run and what else belongs to TensorRT's plans need --executor tensorrt beside them."
        )


def _engine_weights(
    config: BuildConfig, target: TargetCheckpoint, heads: list[HeadCheckpoint], progress: Progress
) -> tuple[EngineWeights, list[HeadSpec]]:
    dtype = DTYPES[config.dtype]
    names = len(target.weights) + sum(len(head.weights) for head in heads)
    progress.stage(f"converting weights to {config.dtype.value}", names)
    weights: EngineWeights = {}
    sources = {"target": target.weights} | {head_prefix(place): head.weights for place, head in enumerate(heads)}
    for prefix, tensors in sources.items():
        for name in tensors:
            kept = kept_in_few_bits(config, target, name) if prefix == "target" else None
            weights[f"{prefix}.{name}"] = kept or _converted(tensors[name], dtype)
            progress.advance()
    if config.draft_vocabulary is not None and heads and all(head.spec.owns_lm_head for head in heads):
        raise ConfigError(
            "--draft-vocabulary is for heads that borrow the target's lm_head; this head has its own, leave it out."
        )
    specs = [_with_draft_vocabulary(config, place, head.spec, weights) for place, head in enumerate(heads)]
    return weights, specs


def _with_draft_vocabulary(config: BuildConfig, place: int, spec: HeadSpec, weights: EngineWeights) -> HeadSpec:
    """The head at this place with the vocabulary it may propose from; `weights` take in what it needs to know it."""
    if spec.owns_lm_head:
        return spec
    size = _draft_size(config, spec.vocab_size)
    if size < 1:
        raise ConfigError(f"--draft-vocabulary is {config.draft_vocabulary}; it must be at least 1.")
    if size == spec.vocab_size:
        return spec
    weights[f"{head_prefix(place)}.draft_token_ids"] = torch.arange(size)
    return replace(spec, draft_vocab_size=size)


def default_pool_tokens(max_batch_size: int, max_context_tokens: int) -> int:
    """Room for so many sequences of full length, and for the tree that one of them drafts behind its last token.

    Without that a lone sequence of full length would not fit; where the batch is full of such, the last one waits.
    """
    return max_batch_size * max_context_tokens + 2 * MAX_TREE_NODES


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _manifest(
    config: BuildConfig,
    target: TargetCheckpoint,
    heads: list[HeadCheckpoint],
    tree: TreeConfig,
    has_chat_template: bool,
) -> Manifest:
    acceptance = resolve_acceptance(config.acceptance, tree, heads[0].spec.kind if heads else None)
    name = config.name or target.source.resolve().stem
    sources = {"target": target.source.name} | {head_prefix(place): path.name for place, path in enumerate(config.head)}
    return Manifest(
        name=name,
        executor=config.executor,
        versions=installed_versions(),
        dtype=config.dtype,
        target=target.spec,
        head=heads[0].spec if heads else None,
        more_heads=tuple(head.spec for head in heads[1:]),
        tree=tree,
        max_batch_size=config.max_batch_size,
        max_context_tokens=config.max_context_tokens,
        max_pool_tokens=config.max_pool_tokens or default_pool_tokens(config.max_batch_size, config.max_context_tokens),
        page_size=config.page_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        acceptance=acceptance,
        is_adaptive=config.adaptive and can_adapt(len(heads), tree, acceptance),
        bos_token_id=target.spec.bos_token_id,
        eos_token_ids=target.spec.eos_token_ids,
        has_chat_template=has_chat_template,
        sources=sources,
        files={},
    )
