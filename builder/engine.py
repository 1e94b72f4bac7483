"""The engine directory: what is in it, how it is read and checked.

config.json         {version, pretrained_config, build_config}, TensorRT-LLM's layout
manifest.json       everything furcate needs to run it, and the sha256 of every other file
rank0.safetensors   weights of target ("target." prefix) and head ("head."); for TensorRT what its plans do not hold themselves
rank<R>.engine      TensorRT: the target's plan of rank R; rank0.head.engine and rank0.fuse.engine, the head's
tokenizer/          the target's tokenizer and chat template
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.config import DataType, Executor
from furcate.builder.errors import EngineMismatch
from furcate.builder.network.spec import (
    Activation,
    DecoderSpec,
    HeadKind,
    HeadSpec,
    RopeKind,
    RopeSpec,
)
from furcate.builder.staging import staged
from furcate.builder.tensorrt_config import TensorRTRecord, tensorrt_record_from_json
from furcate.builder.tree_config import TreeConfig, tree_config_from_json

FORMAT = 1
WEIGHTS_FILE = "rank0.safetensors"
MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an engine is. Sizes are counts, `dtype` is the compute and cache dtype."""

    format: int = FORMAT
    name: str
    executor: Executor
    versions: dict[str, str]
    dtype: DataType
    target: DecoderSpec
    head: HeadSpec | None
    more_heads: tuple[HeadSpec, ...] = ()
    """Heads beside the first, whose trees are merged with its."""
    tree: TreeConfig
    max_batch_size: int
    max_context_tokens: int
    max_pool_tokens: int
    page_size: int
    prefill_chunk_tokens: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    acceptance: Acceptance = Acceptance.MATCH
    is_adaptive: bool = False
    tuning: dict[str, Any] | None = None
    """What `furcate tune` measured on the device it ran on; None before."""
    sources: dict[str, str]
    files: dict[str, str]
    weight_format: str | None = None
    """fp8, int4 or mixed: how quantised weights are kept; None where all are of `dtype`."""
    tensorrt: TensorRTRecord | None = None
    """The plans of a TensorRT engine; None for the torch executor."""

    @property
    def tp_size(self) -> int:
        """GPUs that share the target."""
        return 1 if self.tensorrt is None else self.tensorrt.tp_size

    @property
    def heads(self) -> tuple[HeadSpec, ...]:
        """All heads."""
        return () if self.head is None else (self.head, *self.more_heads)

    @property
    def head_kind(self) -> HeadKind | None:
        """The head's kind, None without a head."""
        return self.head.kind if self.head is not None else None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's taps (input-of-layer convention), head after head; empty without one."""
        return tuple(layer for head in self.heads for layer in head.feature_layers)

    def kv_bytes_per_token(self, num_ranks: int = 1) -> int:
        """Bytes of K/V cache one committed token takes on rank 0, target and heads together: ranks divide the target's alone."""
        size = 4 if self.dtype is DataType.FLOAT32 else 2
        own = self.target.num_layers * self.target.num_kv_heads * self.target.head_dim // num_ranks
        decoders = [head.decoder for head in self.heads if head.decoder is not None]
        drafted = sum(decoder.num_layers * decoder.num_kv_heads * decoder.head_dim for decoder in decoders)
        return 2 * size * (own + drafted)

    def to_json(self) -> str:
        """The manifest as JSON text, with the keys clients read first at the top level."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        value["target"], value["head"] = asdict(self.target), asdict(self.head) if self.head else None
        value["more_heads"] = [asdict(head) for head in self.more_heads]
        value["tree"] = self.tree.to_json()
        del value["tensorrt"]
        if self.tensorrt is not None:
            value["tensorrt"] = asdict(self.tensorrt)
        value["vocab_size"] = self.target.vocab_size
        value["head_kind"] = self.head_kind
        value["is_lossless"] = self.acceptance.is_lossless
        return json.dumps(value, indent=2)


def head_prefix(place: int) -> str:
    """Under which the weights and the source of the engine's head at this place go: head, head2, head3, .."""
    return "head" if place == 0 else f"head{place + 1}"


def installed_versions() -> dict[str, str]:
    """The versions that shape an engine's weights and results."""
    return {name: version(name) for name in ("furcate", "torch", "transformers", "tokenizers", "safetensors")}


def file_hash(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """sha256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


@dataclass(frozen=True)
class Engine:
    """An engine directory that has been read and checked."""

    path: Path
    manifest: Manifest

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the target's tokenizer."""
        return self.path / "tokenizer"

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The named tensors of "target" or of a head (`head_prefix`), memory-mapped."""
        path = self.path / WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(f"{prefix}.")]  # noqa: SIM118
                return {name.removeprefix(f"{prefix}."): file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise EngineMismatch(f"engine file {path} cannot be read ({error}); build the engine again.") from error


def rewrite_manifest(path: Path, manifest: Manifest) -> None:
    """Gives the engine at `path` another manifest, and a config.json that agrees with it; all at once or not at all.

    The other files stay the same ones on disk. Raises BuildError when the disk refuses.
    """
    from furcate.builder.trtllm_config import trtllm_config

    with staged(path) as directory:
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
            copy = directory / file.relative_to(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file.name not in (MANIFEST_FILE, CONFIG_FILE) or file.parent != path:
                os.link(file, copy)
        config = directory / CONFIG_FILE
        config.write_text(json.dumps(trtllm_config(manifest), indent=2))
        manifest = replace(manifest, files={**manifest.files, CONFIG_FILE: file_hash(config)})
        (directory / MANIFEST_FILE).write_text(manifest.to_json())


def read_engine(path: Path, *, checks_hashes: bool = True) -> Engine:
    """The engine at `path`, every file present and unchanged.

    Raises EngineMismatch naming the file, version or hash that differs.
    """
    manifest_path = path / MANIFEST_FILE
    if not path.is_dir():
        raise EngineMismatch(f"there is no engine directory at {path}; build one with build_engine --output {path}.")
    try:
        value = json.loads(manifest_path.read_text())
    except OSError as error:
        raise EngineMismatch(
            f"{path} is not an engine: {MANIFEST_FILE} cannot be read; build one with build_engine."
        ) from error
    except ValueError as error:
        raise EngineMismatch(f"{manifest_path} is damaged ({error}); build the engine again.") from error
    if value.get("format") != FORMAT:
        raise EngineMismatch(
            f"{path} has engine format {value.get('format')}, this furcate reads {FORMAT}; build it again."
        )
    try:
        manifest = _manifest_from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineMismatch(f"{manifest_path} is damaged ({error!r}); build the engine again.") from error
    for name, digest in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise EngineMismatch(f"engine file {file} is missing; build the engine again.")
        if checks_hashes and file_hash(file) != digest:
            raise EngineMismatch(f"engine file {file} has changed since it was built; build the engine again.")
    return Engine(path, manifest)


_REPEATED = ("vocab_size", "head_kind", "is_lossless")
"""Keys that `to_json` adds for readers of the file; they follow from the others."""


def _manifest_from_json(value: dict) -> Manifest:
    value = {key: entry for key, entry in value.items() if key not in _REPEATED}
    return Manifest(
        **{
            **value,
            "executor": Executor(value["executor"]),
            "dtype": DataType(value["dtype"]),
            "target": _decoder_from_json(value["target"]),
            "head": _head_from_json(value["head"]) if value["head"] is not None else None,
            "more_heads": tuple(map(_head_from_json, value.get("more_heads", ()))),
            "tree": tree_config_from_json(value["tree"]),
            "acceptance": Acceptance(value.get("acceptance", Acceptance.MATCH)),
            "eos_token_ids": tuple(value["eos_token_ids"]),
            "tensorrt": tensorrt_record_from_json(value["tensorrt"]) if "tensorrt" in value else None,
        }
    )


def _decoder_from_json(value: dict) -> DecoderSpec:
    rope = _rope_from_json(value["rope"])
    local = _rope_from_json(value["local_rope"]) if value["local_rope"] is not None else None
    sliding = tuple(value["sliding_layers"]) if value["sliding_layers"] is not None else None
    changed = {
        "rope": rope,
        "local_rope": local,
        "sliding_layers": sliding,
        "activation": Activation(value["activation"]),
    }
    return DecoderSpec(**{**value, **changed, "eos_token_ids": tuple(value["eos_token_ids"])})


def _rope_from_json(value: dict) -> RopeSpec:
    return RopeSpec(**{**value, "kind": RopeKind(value["kind"])})


def _head_from_json(value: dict) -> HeadSpec:
    decoder = _decoder_from_json(value["decoder"]) if value["decoder"] is not None else None
    changed = {"kind": HeadKind(value["kind"]), "feature_layers": tuple(value["feature_layers"]), "decoder": decoder}
    return HeadSpec(**{**value, **changed})
