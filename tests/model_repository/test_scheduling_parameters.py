"""Scheduling settings go through config.pbtxt unchanged, and a wrong one is named."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from furcate.builder.cli import main
from furcate.builder.config import Layout
from furcate.builder.errors import ConfigError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig
from furcate.model_repository.generate import write_repository
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


def test_the_repository_carries_what_the_build_was_told(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    scheduling = SchedulingConfig(prefix_reuse=False, max_waiting_requests=40)
    lives = []
    for name, settings in {"set": scheduling, "usual": None}.items():
        write_repository(tmp_path / name, engine_dir=tiny_engine("eagle3"), scheduling=settings)
        config = pb.ModelConfig()
        text_format.Parse((tmp_path / name / "tensorrt_llm/config.pbtxt").read_text(), config)
        lives.append(config.sequence_batching.oldest.max_candidate_sequences)
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        assert served_scheduling(model_args(parameters)) == (settings or SchedulingConfig())
    # Triton hands over as many more as may wait, so that the limit is what refuses them.
    assert lives[0] == lives[1] + 40


def test_the_staged_layout_keeps_no_prefix_and_promises_in_full(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = tiny_engine("eagle3")
    write_repository(tmp_path / "staged", engine_dir=engine, layout=Layout.STAGED)
    config = pb.ModelConfig()
    text_format.Parse((tmp_path / "staged/tensorrt_llm/config.pbtxt").read_text(), config)
    assert config.parameters["prefix_reuse"].string_value == "false"
    with pytest.raises(ConfigError, match="reservation is optimistic, but the staged layout promises pages in full"):
        write_repository(
            tmp_path / "refused",
            engine_dir=engine,
            layout=Layout.STAGED,
            scheduling=SchedulingConfig(reservation=Reservation.OPTIMISTIC),
        )
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--no-prefix-reuse"], "the repository's; give --repository too."),
        (["--repository", "r", "--max-waiting-s", "0"], "max_waiting_s is 0.0; it must be above 0"),
    ],
)
def test_the_command_line_refuses_what_would_have_no_effect_or_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["build_engine", "--target", "nowhere", "--output", "engine", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
