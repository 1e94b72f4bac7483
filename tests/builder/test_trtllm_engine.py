"""Which way an engine's target plan takes: TensorRT-LLM's classes up to 1.2.1, plain TensorRT otherwise."""

import json
from types import SimpleNamespace

import pytest

from furcate.builder import trtllm_engine
from furcate.builder.engine import read_engine
from furcate.builder.errors import BuildError
from furcate.builder.trtllm_engine import create_builder, save_target, trtllm_builder_module


class Engine:
    """tensorrt_llm.builder.Engine: `save` writes config.json and the plan of its mapping's rank."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    def save(self, directory):
        with open(f"{directory}/rank{self.config.pretrained_config.mapping.rank}.engine", "wb") as file:
            file.write(self.plan)


def reader(text: str):
    config = json.loads(text)
    mapping = SimpleNamespace(rank=0, **config["pretrained_config"]["mapping"])
    return SimpleNamespace(pretrained_config=SimpleNamespace(mapping=mapping))


TRTLLM = SimpleNamespace(
    Engine=Engine,
    EngineConfig=SimpleNamespace(from_json_str=reader),
    Builder=lambda: SimpleNamespace(trt_builder="TensorRT-LLM's builder"),
)


def test_without_tensorrt_llm_one_line_says_so():
    module, line = trtllm_builder_module()
    assert module is None
    assert line == "tensorrt_llm is not installed: plain TensorRT writes the same directory"


@pytest.mark.parametrize(("installed", "words"), [
    ("1.3.0", "has no engine builder (1.2.1 was the last)"), ("1.2.1", "cannot be imported"),
])  # fmt: skip
def test_a_newer_or_broken_tensorrt_llm_is_passed_over_in_one_line(monkeypatch, installed, words):
    monkeypatch.setattr(trtllm_engine, "version", lambda name: installed)
    module, line = trtllm_builder_module()
    assert module is None
    assert words in line and "\n" not in line


@pytest.mark.parametrize("trtllm", [None, TRTLLM])
def test_the_plan_of_a_rank_is_written_either_way(tiny_engine, tmp_path, trtllm):
    save_target(tmp_path, read_engine(tiny_engine("eagle3")).manifest, b"plan", 1, trtllm)
    assert (tmp_path / "rank1.engine").read_bytes() == b"plan"


def test_its_builder_is_used_where_it_is():
    assert create_builder(None, TRTLLM) == "TensorRT-LLM's builder"


def test_a_config_that_its_reader_refuses_is_an_error_of_the_build(tiny_engine, tmp_path):
    def refusing(text):
        raise KeyError("max_beam_width")

    module = SimpleNamespace(EngineConfig=SimpleNamespace(from_json_str=refusing))
    with pytest.raises(
        BuildError, match=r"tensorrt_llm refuses the engine's config.json \(KeyError\('max_beam_width'\)\)"
    ):
        save_target(tmp_path, read_engine(tiny_engine("eagle3")).manifest, b"plan", 0, module)
