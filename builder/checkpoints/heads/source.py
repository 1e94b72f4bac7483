"""What every head reader starts from: an opened head directory, the target it is for, and the checks common to all layouts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furcate.builder.checkpoints.stored import StoredTensor
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec


@dataclass(frozen=True)
class HeadSource:
    """An opened head: config.json, stored tensors (wrapper prefixes removed), its target, and warnings gathered on the way."""

    path: Path
    config: dict[str, Any]
    stored: dict[str, StoredTensor]
    target: DecoderSpec
    warnings: list[str] = field(default_factory=list)

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting that exporters write at the top of config.json or into `eagle_config`."""
        nested = self.config.get("eagle_config") or {}
        values = [place[name] for place in (self.config, nested) if place.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            raise CheckpointError(
                f"{self.path / 'config.json'} says {name} twice: {values[0]} at the top, {values[1]} in eagle_config; "
                "remove the wrong one."
            )
        return values[0] if values else default

    def shape(self, name: str, rank: int = 2) -> tuple[int, ...]:
        """The shape of a stored tensor that the layout cannot do without."""
        stored = self.stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path} holds no tensor '{name}'; the head is incomplete or of another layout.")
        if len(stored.shape) != rank:
            raise CheckpointError(f"{stored.file}: '{name}' is {list(stored.shape)}; {rank} dimensions are expected.")
        return stored.shape

    def check_hidden_size(self, size: int, where: str) -> None:
        """Raises CheckpointError unless `size` is the target's hidden size."""
        if size != self.target.hidden_size:
            raise CheckpointError(
                f"{self.path} is a head for hidden size {size} ({where}), but the target's is {self.target.hidden_size}; "
                "give the head trained for this target."
            )

    def check_vocabulary(self, size: int | None, where: str) -> None:
        """Raises CheckpointError unless `size` (None: not said) is the target's vocabulary."""
        if size is not None and size != self.target.vocab_size:
            raise CheckpointError(
                f"{self.path} is a head for a vocabulary of {size} tokens ({where}), but the target has "
                f"{self.target.vocab_size}; give the head trained for this target."
            )
