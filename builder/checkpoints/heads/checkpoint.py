"""A head checkpoint in furcate's named-tensor form."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from furcate.builder.network.spec import HeadSpec


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head as `spec` and `weights` (named form, see network/spec.py), with what its reader had to assume."""

    spec: HeadSpec
    weights: Mapping[str, Tensor]
    warnings: tuple[str, ...]
    source: Path
