"""The files of a generated repository."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.config import Layout
from furcate.builder.errors import ConfigError
from furcate.model_repository.generate import write_repository


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine("eagle3")


def config_of(repository: Path, model_name: str) -> "pb.ModelConfig":
    return text_format.Parse((repository / model_name / "config.pbtxt").read_text(), pb.ModelConfig())


def test_repository_has_four_models_and_thin_files(engine: Path, tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", engine_dir=engine)
    assert sorted(os.listdir(repository)) == ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm"]
    assert os.listdir(repository / "ensemble/1") == []
    for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
        lines = (repository / name / "1/model.py").read_text().splitlines()
        statements = [line for line in lines if line and not line.startswith('"""')]
        assert len(statements) == 1
        assert statements[0].startswith("from furcate.model_repository.")


def test_configs_say_how_triton_runs_each_model(engine: Path, tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", engine_dir=engine, max_batch_size=3)
    steps = config_of(repository, "tensorrt_llm")
    assert steps.max_batch_size == 3
    assert steps.model_transaction_policy.decoupled
    assert steps.sequence_batching.iterative_sequence
    assert steps.sequence_batching.oldest.max_candidate_sequences >= 3
    assert all(tensor.allow_ragged_batch for tensor in steps.input)
    assert steps.instance_group[0].kind == pb.ModelInstanceGroup.KIND_MODEL
    for name in ("preprocessing", "postprocessing"):
        (group,) = config_of(repository, name).instance_group
        assert (group.kind, group.count) == (pb.ModelInstanceGroup.KIND_CPU, 1)
    ensemble = config_of(repository, "ensemble")
    assert ensemble.platform == "ensemble"
    assert ensemble.model_transaction_policy.decoupled


def test_engine_is_found_relative_to_the_repository(engine: Path, tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "deep/er/repository", engine_dir=engine)
    for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
        relative = config_of(repository, name).parameters["engine_dir"].string_value
        assert not os.path.isabs(relative)
        assert (repository / relative).resolve() == engine.resolve()


def test_an_old_repository_is_replaced_only_when_asked(engine: Path, tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", engine_dir=engine, max_batch_size=1)
    with pytest.raises(ConfigError, match="exists already"):
        write_repository(repository, engine_dir=engine, max_batch_size=2)
    assert config_of(repository, "ensemble").max_batch_size == 1
    write_repository(repository, engine_dir=engine, max_batch_size=2, may_replace=True)
    assert config_of(repository, "ensemble").max_batch_size == 2
    assert os.listdir(tmp_path) == ["repository"]


def test_no_engine_and_too_many_rows_are_refused(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no engine directory: manifest\.json cannot be read"):
        write_repository(tmp_path / "repository", engine_dir=tmp_path)
    with pytest.raises(ConfigError, match="max_batch_size is 33, but this engine allows 1 to 32"):
        write_repository(tmp_path / "repository", engine_dir=engine, max_batch_size=33)
    assert os.listdir(tmp_path) == []


def test_the_staged_layout_adds_a_model_for_each_stage_and_their_ensemble(engine: Path, tmp_path: Path) -> None:
    fused = write_repository(tmp_path / "fused", engine_dir=engine)
    repository = write_repository(tmp_path / "staged", engine_dir=engine, layout=Layout.STAGED)
    added = set(os.listdir(repository)) - set(os.listdir(fused))
    assert added == {"speculative_step", "tree_construction", "verification", "acceptance"}
    for name in ("ensemble", "preprocessing", "postprocessing"):
        assert config_of(repository, name) == config_of(fused, name)
    steps = config_of(repository, "speculative_step")
    assert [step.model_name for step in steps.ensemble_scheduling.step] == [
        "tree_construction",
        "verification",
        "acceptance",
    ]
    assert not steps.model_transaction_policy.decoupled
    given = {tensor.name for tensor in steps.input}
    for step in steps.ensemble_scheduling.step:
        required = {tensor.name for tensor in config_of(repository, step.model_name).input if not tensor.optional}
        assert set(step.input_map) == required
        assert set(step.input_map.values()) <= given
        given |= set(step.output_map.values())
    assert {tensor.name for tensor in steps.output} <= given


def test_an_engine_that_cannot_be_staged_writes_nothing(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    drawn = tiny_engine("eagle3", acceptance=Acceptance.UNIVER)
    with pytest.raises(ConfigError, match="acceptance 'univer' needs its laws"):
        write_repository(tmp_path / "staged", engine_dir=drawn, layout=Layout.STAGED)
    assert os.listdir(tmp_path) == []
