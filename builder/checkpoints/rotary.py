"""RopeSpec of a Hugging Face configuration, whichever transformers version wrote it.

transformers 5 keeps everything under `rope_parameters`; 4 kept `rope_theta` and `rope_scaling` at the top. Its configuration
classes turn the second into the first, so only the first is read here.
"""

from typing import Any

from transformers import PreTrainedConfig

from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import RopeKind, RopeSpec

_NOT_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def rope_spec(config: PreTrainedConfig, layer_type: str | None = None) -> RopeSpec:
    """The rotary embedding of `config`, of its layers of `layer_type` where they differ (Gemma 3).

    transformers has checked that the kind's fields are there. Raises CheckpointError for a kind that furcate does not know.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if layer_type is not None:
        parameters = dict(parameters.get(layer_type) or {})
    name = str(parameters.get("rope_type", "default"))
    if name not in {kind.value for kind in RopeKind}:
        allowed = ", ".join(kind.value for kind in RopeKind)
        raise CheckpointError(f"rope scaling '{name}' is not supported; allowed are {allowed}.")
    _refuse_partial(parameters)
    kind = RopeKind(name)
    scaling = {field: value for field, value in parameters.items() if field not in _NOT_SCALING and value is not None}
    theta = parameters.get("rope_theta")
    return RopeSpec(
        kind=kind, theta=10000.0 if theta is None else float(theta), parameters={} if name == "default" else scaling
    )


def describe_rope(rope: RopeSpec) -> str:
    """The rotary embedding in a few words, for messages."""
    factor = rope.parameters.get("factor")
    return f"{rope.kind.value}, theta {rope.theta:g}" + ("" if factor is None else f", factor {factor:g}")


def _refuse_partial(parameters: dict[str, Any]) -> None:
    fraction = parameters.get("partial_rotary_factor")
    if fraction is not None and fraction != 1.0:
        raise CheckpointError(
            f"config.json rotates {fraction:g} of each attention head (partial_rotary_factor); "
            "only whole-head rotary embeddings are supported."
        )
