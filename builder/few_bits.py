"""Which weights of a quantised target an engine keeps in few bits: TensorRT's plans those of the layers, torch none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from torch import Tensor

from furcate.builder.checkpoints.named import NamedTensors
from furcate.builder.checkpoints.target import TargetCheckpoint
from furcate.builder.config import BuildConfig, Executor
from furcate.builder.errors import ConfigError
from furcate.builder.network.quantised import QuantisedWeight

EngineWeights = dict[str, Tensor | QuantisedWeight]


def _is_kept(name: str) -> bool:
    # Embedding and lm_head may be shared with the head, which reads them as plain tables.
    return name.startswith("layers.")


def check_few_bits(config: BuildConfig, target: TargetCheckpoint) -> None:
    """Raises ConfigError where a plan of a quantised target is to be refitted: its weights are not the stored tensors."""
    if (config.tensorrt.refit or config.tensorrt.strip_weights) and bits_per_weight(target):
        raise ConfigError(
            f"--refit and --strip-weights do not go with the quantised target {target.source}; leave them out, or give the "
            "checkpoint it was quantised from."
        )


def kept_in_few_bits(config: BuildConfig, target: TargetCheckpoint, name: str) -> QuantisedWeight | None:
    """The target's weight as the engine keeps it in few bits; None where it is to be a plain tensor."""
    if config.executor is not Executor.TENSORRT or not _is_kept(name) or not isinstance(target.weights, NamedTensors):
        return None
    return target.weights.quantised(name)


def bits_per_weight(target: TargetCheckpoint) -> dict[str, float]:
    """What a plan's weights in few bits take each, scales included, by the target's names; read from shapes alone."""
    if not isinstance(target.weights, NamedTensors):
        return {}
    found = {name: target.weights.bits_per_weight(name) for name in target.weights if _is_kept(name)}
    return {name: bits for name, bits in found.items() if bits is not None}


def weight_format(weights: Iterable[Tensor | QuantisedWeight]) -> str | None:
    """`fp8`, `int4` or `mixed`: how an engine keeps its quantised weights; None without any."""
    found = {"int4" if weight.is_int4 else "fp8" for weight in weights if isinstance(weight, QuantisedWeight)}
    return None if not found else found.pop() if len(found) == 1 else "mixed"


def plain_weights(weights: Mapping[str, Tensor | QuantisedWeight]) -> dict[str, Tensor]:
    """The weights of an engine that keeps none in few bits."""
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
    assert len(plain) == len(weights), "the torch executor's weights are dequantised"
    return plain


def num_bytes(shape: tuple[int, ...], bits: float) -> int:
    """Bytes of a weight of that shape."""
    return round(prod(shape) * bits / 8)
