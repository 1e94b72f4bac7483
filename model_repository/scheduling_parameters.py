"""The scheduling settings among the parameters of `tensorrt_llm`'s config.pbtxt, where an operator may change them."""

import json
from collections.abc import Mapping
from dataclasses import fields

from furcate.builder.errors import ConfigError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig, checked_scheduling

_READERS = {
    "prefix_reuse": {"true": True, "false": False}.__getitem__,
    "reservation": Reservation,
    "prefill_tokens_per_step": int,
    "max_waiting_requests": int,
    "max_waiting_s": float,
}


def parameters_from_scheduling(scheduling: SchedulingConfig) -> dict[str, str]:
    """The parameters' texts; a limit that is left to its default is left out."""
    values = {field.name: getattr(scheduling, field.name) for field in fields(scheduling)}
    return {name: str(value).lower() for name, value in values.items() if value is not None}


def served_scheduling(model_args: Mapping[str, str]) -> SchedulingConfig:
    """The settings in a model's config; ConfigError names the parameter that is not right.

    `model_args` is what Triton hands to `initialize`.
    """
    parameters = json.loads(model_args["model_config"])["parameters"]
    values = {}
    for name, read in _READERS.items():
        if name in parameters:
            text = parameters[name]["string_value"]
            try:
                values[name] = read(text)
            except (KeyError, ValueError):
                raise ConfigError(
                    f"the parameter '{name}' in config.pbtxt is '{text}', which cannot be read."
                ) from None
    return checked_scheduling(SchedulingConfig(**values))
