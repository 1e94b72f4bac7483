"""What a checkpoint directory stores, known without reading it: name -> shape, dtype and a way to load the tensor.

safetensors files are mapped into memory, so a tensor costs memory only while somebody holds it: a model larger than memory
can be read tensor by tensor. Pickles are opened only when asked for, and then with torch's `weights_only`.
"""

import json
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from furcate.builder.errors import CheckpointError
from furcate.builder.network.quantised import QuantisedWeight

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Files that trainers leave beside the weights.
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state.*|scaler)\.(bin|pt|pth)")
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint; `load` reads it (safetensors: maps it) in its stored dtype.

    `load_quantised` gives a quantised weight as it is stored; None where it is not one, or of no format that plans keep.
    `bits_per_weight` is what such a weight takes, scales included, known without reading it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    load: Callable[[], Tensor]
    load_quantised: Callable[[], QuantisedWeight | None] = lambda: None
    bits_per_weight: float | None = None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when it is missing, a Git LFS pointer, or no JSON object."""
    refuse_missing_or_pointer(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a JSON {type(content).__name__}; an object is expected.")
    return content


def refuse_missing_or_pointer(file: Path) -> None:
    """Raises CheckpointError unless `file` is a file with content of its own."""
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; the checkpoint directory is incomplete.")
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` there.")
    if not start:
        raise CheckpointError(f"{file} is empty; download it again.")


def stored_tensors(directory: Path, *, allows_pickle: bool = False) -> dict[str, StoredTensor]:
    """Every tensor stored in `directory` (safetensors first; .bin and .pt only with `allows_pickle`).

    Raises CheckpointError for a missing shard, a truncated file, a Git LFS pointer, or a pickle that was not asked for.
    """
    files, promised = _weight_files(directory)
    if files[0].suffix != ".safetensors" and not allows_pickle:
        raise CheckpointError(
            f"{files[0]} is a pickle, which can hold more than tensors; convert it to safetensors, or allow pickles "
            "(it is then read with torch's weights_only)."
        )
    stored: dict[str, StoredTensor] = {}
    for file in files:
        refuse_missing_or_pointer(file)
        stored.update(_safetensors(file) if file.suffix == ".safetensors" else _pickled(file))
    for name, file in promised.items():
        if name not in stored:
            raise CheckpointError(f"{file} does not hold '{name}', which the index promises; download it again.")
    return stored


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read and, where there is an index, the file it promises for each tensor."""
    for suffix in ("safetensors", "bin"):
        indices = sorted(directory.glob(f"*.{suffix}.index.json"))
        if indices:
            weight_map = read_json(indices[0]).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{indices[0]} has no weight_map; download it again.")
            promised = {name: directory / file for name, file in weight_map.items()}
            for file in promised.values():
                if not file.is_file():
                    raise CheckpointError(f"{file} is missing, though {indices[0].name} names it; download that shard.")
            return sorted(set(promised.values())), promised
        files = _without_index(directory, suffix)
        if files:
            return files, {}
    raise CheckpointError(
        f"{directory} holds no weights: expected *.safetensors, pytorch_model*.bin or *.pt beside config.json."
    )


def _without_index(directory: Path, suffix: str) -> list[Path]:
    patterns = ["*.safetensors"] if suffix == "safetensors" else ["*.bin", "*.pt"]
    found = sorted(file for pattern in patterns for file in directory.glob(pattern))
    files = [file for file in found if not _NOT_WEIGHTS.fullmatch(file.name)]
    # Some repositories ship the vendor's own copy (consolidated.safetensors) beside the Hugging Face one.
    files = [file for file in files if file.name.startswith(("model", "pytorch_model"))] or files
    if files and all(file.name.startswith("adapter_model") for file in files):
        raise CheckpointError(f"{files[0]} is an adapter, not a model; merge it into its base model first.")
    _refuse_missing_shard(files)
    return files


def _refuse_missing_shard(files: Iterable[Path]) -> None:
    for file in files:
        shard = _SHARD_NAME.fullmatch(file.name)
        if shard is None:
            continue
        stem, count, suffix = shard[1], int(shard[3]), shard[4]
        for number in range(1, count + 1):
            wanted = file.with_name(f"{stem}-{number:05d}-of-{count:05d}.{suffix}")
            if not wanted.is_file():
                raise CheckpointError(f"{wanted} is missing: {file.name} says there are {count} shards.")


def stored_file(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file. Raises CheckpointError for a missing, truncated or damaged one."""
    refuse_missing_or_pointer(file)
    return _safetensors(file)


def _safetensors(file: Path) -> dict[str, StoredTensor]:
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({str(error).splitlines()[0]}); download it again."
        ) from None
    stored = {}
    for name in opened.keys():  # noqa: SIM118  (the handle is no mapping)
        piece = opened.get_slice(name)
        dtype = _SAFETENSORS_DTYPES.get(piece.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{file}: '{name}' has dtype {piece.get_dtype()}, which furcate does not read.")
        stored[name] = StoredTensor(tuple(piece.get_shape()), dtype, file, _safetensors_loader(opened, name))
    return stored


def _safetensors_loader(opened: Any, name: str) -> Callable[[], Tensor]:
    return lambda: opened.get_tensor(name)


def _pickled(file: Path) -> dict[str, StoredTensor]:
    try:
        content = _load_pickle(file)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors ({str(error).splitlines()[0]}); it is not read."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is truncated or damaged ({str(error).splitlines()[0]}); download it again."
        ) from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{file} is not a flat dictionary of tensors; save the module's state_dict().")
    return {
        name: StoredTensor(tuple(tensor.shape), tensor.dtype, file, lambda tensor=tensor: tensor)
        for name, tensor in content.items()
    }


def _load_pickle(file: Path) -> Any:
    with file.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    # Files of torch before 1.6 are no zip archives and cannot be mapped.
    return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
