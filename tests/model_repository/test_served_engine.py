"""A repository is served by the code that knows its models' inputs and outputs, or refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from furcate.builder.config import Layout
from furcate.builder.errors import EngineMismatch
from furcate.model_repository.generate import write_repository
from furcate.model_repository.served_engine import served_engine


@pytest.fixture(scope="module")
def repository(tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "repository"
    return write_repository(directory, engine_dir=tiny_engine("eagle3"), layout=Layout.STAGED)


def model_args(repository: Path, name: str) -> dict[str, str]:
    """What Triton hands to a model's `initialize`."""
    config = text_format.Parse((repository / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())  # pyright: ignore[reportAttributeAccessIssue]
    found = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return {"model_config": json.dumps(found), "model_repository": str(repository / name)}


@pytest.mark.parametrize("name", ["preprocessing", "tensorrt_llm", "postprocessing", "verification", "acceptance"])
def test_a_repository_of_another_version_is_refused_in_one_sentence(repository: Path, name: str) -> None:
    args = model_args(repository, name)
    assert served_engine(args).vocab_size == 300
    for kind in ("input", "output"):
        config = json.loads(args["model_config"])
        config[kind].pop()
        with pytest.raises(EngineMismatch, match=f"'{name}' was written by another version of furcate .its {kind}s"):
            served_engine({**args, "model_config": json.dumps(config)})
