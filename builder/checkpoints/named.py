"""Named tensors made of stored ones: the plan is checked whole before the first tensor is read, and read one at a time."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from furcate.builder.checkpoints.stored import StoredTensor
from furcate.builder.errors import CheckpointError
from furcate.builder.network.quantised import QuantisedWeight, stacked

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Part:
    """One stored tensor of a named one: its stored name, the shape it must have, and what is taken of it (None: all)."""

    stored: str
    shape: tuple[int, ...]
    pick: Callable[[Tensor], Tensor] | None = None


class NamedTensors(Mapping[str, Tensor]):
    """Tensors in furcate's named form, read at each access.

    A tensor stored on its own comes as stored, without a copy; a fused one (qkv, gate_up) is concatenated at each access, so
    keep what you use twice. `dict(named)` reads everything.
    """

    def __init__(self, parts: dict[str, tuple[Part, ...] | Tensor], stored: Mapping[str, StoredTensor]) -> None:
        self._parts = parts
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        if isinstance(parts, Tensor):
            return parts
        pieces = [self._load(part) for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _load(self, part: Part) -> Tensor:
        tensor = self._stored[part.stored].load()
        return tensor if part.pick is None else part.pick(tensor)

    def quantised(self, name: str) -> QuantisedWeight | None:
        """The weight in the few bits that it is stored in; None where its parts are not all stored so, or not alike."""
        parts = self._parts[name]
        if isinstance(parts, Tensor) or any(part.pick is not None for part in parts):
            return None
        weights = [self._stored[part.stored].load_quantised() for part in parts]
        found = [weight for weight in weights if weight is not None]
        return stacked(found) if len(found) == len(weights) else None

    def bits_per_weight(self, name: str) -> float | None:
        """What the weight takes as it is stored in few bits, known without reading it; None where it is not."""
        parts = self._parts[name]
        if isinstance(parts, Tensor) or any(part.pick is not None for part in parts):
            return None
        bits = [self._stored[part.stored].bits_per_weight for part in parts]
        found = [bit for bit in bits if bit is not None]
        return max(found) if len(found) == len(bits) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, known without reading it unless only a part of a stored one is taken."""
        parts = self._parts[name]
        if isinstance(parts, Tensor) or any(part.pick is not None for part in parts):
            return tuple(self[name].shape)
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of named tensors, read only where the checkpoint does not tell them."""
    if isinstance(weights, NamedTensors):
        return {name: weights.shape(name) for name in weights}
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


class TensorPlan:
    """Collects which stored tensors make which named one; raises CheckpointError for whatever does not fit."""

    def __init__(self, stored: Mapping[str, StoredTensor], source: Path) -> None:
        self.stored = stored
        self.source = source
        self._parts: dict[str, tuple[Part, ...] | Tensor] = {}

    def add(self, name: str, *parts: Part) -> None:
        """Makes `name` of these parts, one below the other (dimension 0)."""
        for part in parts:
            self._check(part)
        self._parts[name] = parts

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Makes `name` of a tensor that the checkpoint only implies (a draft vocabulary, an absent bias)."""
        self._parts[name] = tensor

    def finish(self, ignored: Iterable[str] = ()) -> NamedTensors:
        """The named tensors. Stored ones that neither a part nor an `ignored` pattern names are an error: they would matter."""
        used = {part.stored for parts in self._parts.values() if isinstance(parts, tuple) for part in parts}
        patterns = [re.compile(pattern) for pattern in ignored]
        unread = [
            name
            for name in self.stored
            if name not in used and not any(pattern.fullmatch(name) for pattern in patterns)
        ]
        if unread:
            named = ", ".join(f"'{name}'" for name in sorted(unread)[:4])
            more = f" and {len(unread) - 4} more" if len(unread) > 4 else ""
            raise CheckpointError(
                f"{self.source} holds tensors that its layout does not know: {named}{more}; "
                "reading it without them would give another model."
            )
        return NamedTensors(self._parts, self.stored)

    def _check(self, part: Part) -> None:
        stored = self.stored.get(part.stored)
        if stored is None:
            raise CheckpointError(
                f"{self.source} holds no tensor '{part.stored}'; the checkpoint is incomplete, or its config.json is "
                "that of another one."
            )
        if stored.shape != part.shape:
            raise CheckpointError(
                f"{stored.file}: '{part.stored}' is {list(stored.shape)} where its config.json and the target ask for "
                f"{list(part.shape)}."
            )
        if stored.dtype not in _WEIGHT_DTYPES:
            raise CheckpointError(
                f"{stored.file}: '{part.stored}' is {str(stored.dtype).removeprefix('torch.')}; allowed are float32, float16 "
                "and bfloat16. Dequantise the checkpoint first."
            )
