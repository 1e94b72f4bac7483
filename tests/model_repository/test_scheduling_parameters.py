"""Scheduling settings go through config.pbtxt unchanged, and a wrong one is named."""

import json

import pytest

from furcate.builder.errors import ConfigError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig
from furcate.model_repository.scheduling_parameters import parameters_from_scheduling, served_scheduling


def model_args(parameters: dict[str, str]) -> dict[str, str]:
    """What Triton hands over."""
    values = {name: {"string_value": text} for name, text in parameters.items()}
    return {"model_config": json.dumps({"parameters": values})}


@pytest.mark.parametrize(
    "scheduling",
    [
        SchedulingConfig(),
        SchedulingConfig(
            prefix_reuse=False,
            reservation=Reservation.OPTIMISTIC,
            prefill_tokens_per_step=100,
            max_waiting_requests=0,
            max_waiting_s=2.5,
        ),
    ],
)
def test_settings_come_back_as_they_were(scheduling: SchedulingConfig) -> None:
    assert served_scheduling(model_args(parameters_from_scheduling(scheduling))) == scheduling


def test_a_repository_of_an_older_build_has_the_defaults() -> None:
    assert served_scheduling(model_args({"engine_dir": "../engine"})) == SchedulingConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [("prefix_reuse", "yes"), ("reservation", "half"), ("max_waiting_requests", "many"), ("max_waiting_s", "-1")],
)
def test_a_wrong_parameter_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        served_scheduling(model_args({name: text}))
