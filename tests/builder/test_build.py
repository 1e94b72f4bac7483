"""The engine directory: whole or not at all, checked when it is read, and every bad input answered in one sentence."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.errors import CheckpointError, ConfigError, EngineMismatch, FurcateError


def config_of(target, head, tmp_path, **changes) -> BuildConfig:
    settings = {"target": target, "head": head, "output": tmp_path / "engine", "dtype": DataType.FLOAT32, **changes}
    return BuildConfig(**settings)


def test_an_engine_reads_back_what_was_built(tiny_target, tiny_heads, tmp_path):
    result = build_engine(config_of(tiny_target, tiny_heads["eagle3"], tmp_path, tree="dynamic:20/3/4", name="mine"))
    engine = read_engine(result.path)
    assert engine.manifest == result.manifest
    assert engine.manifest.name == "mine"
    assert engine.manifest.head.feature_layers == (2, 3, 3)
    assert set(engine.manifest.files) >= {"config.json", "rank0.safetensors", "tokenizer/tokenizer.json"}
    value = json.loads((result.path / "manifest.json").read_text())
    assert value["vocab_size"] == 300
    assert value["head_kind"] == "eagle3"
    config = json.loads((result.path / "config.json").read_text())
    assert set(config) == {"version", "pretrained_config", "build_config"}


def test_weights_are_stored_in_the_engine_dtype(tiny_target, tiny_heads, tmp_path):
    build_engine(config_of(tiny_target, tiny_heads["eagle"], tmp_path, dtype=DataType.BFLOAT16))
    weights = load_file(tmp_path / "engine" / "rank0.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_an_existing_output_is_kept_unless_overwriting_is_asked_for(tiny_target, tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists already; choose another path, or add --overwrite"):
        build_engine(config_of(tiny_target, None, tmp_path))
    assert (tmp_path / "engine" / "mine.txt").read_text() == "keep"
    build_engine(config_of(tiny_target, None, tmp_path, overwrite=True))
    assert not (tmp_path / "engine" / "mine.txt").exists()
    assert read_engine(tmp_path / "engine").manifest.head is None


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write anywhere; the next test covers a path that nobody can create"
)
def test_an_output_in_a_read_only_place_is_refused(tiny_target, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        build_engine(config_of(tiny_target, None, tmp_path))


def test_an_output_below_a_file_is_refused(tiny_target, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*choose a writable place"):
        build_engine(config_of(tiny_target, None, tmp_path, output=tmp_path / "file" / "engine"))


BAD_SETTINGS = [
    ({"max_batch_size": 0}, "--max-batch-size is 0; it must be at least 1"),
    ({"max_context_tokens": -5}, "--max-context-tokens is -5; it must be at least 1"),
    ({"prefill_chunk_tokens": 1000}, "--prefill-chunk-tokens is 1000; at most 512 are allowed"),
    ({"page_size": 20}, "--page-size is 20; allowed are 16, 32, 64, 128"),
    ({"max_pool_tokens": 3}, "--max-pool-tokens is 3; it must hold at least one page of 16"),
    ({"tree": "bushy"}, "tree 'bushy' is not known"),
    ({"draft_vocabulary": 0}, "--draft-vocabulary is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD_SETTINGS)
def test_settings_that_are_not_allowed_are_refused_before_anything_is_written(
    tiny_target, tiny_heads, tmp_path, changes, sentence
):
    with pytest.raises(ConfigError) as error:
        build_engine(config_of(tiny_target, tiny_heads["eagle"], tmp_path, **changes))
    assert sentence in str(error.value)
    assert list(tmp_path.iterdir()) == []


def damaged_target(tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "target")
    return tmp_path / "target"


def test_a_truncated_checkpoint_is_refused_by_name(tiny_target, tmp_path):
    target = damaged_target(tiny_target, tmp_path)
    whole = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_engine(config_of(target, None, tmp_path))
    assert not (tmp_path / "engine").exists()


def test_a_missing_checkpoint_is_refused_by_name(tiny_target, tmp_path):
    target = damaged_target(tiny_target, tmp_path)
    (target / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        build_engine(config_of(target, None, tmp_path))


def test_a_target_without_tokenizer_is_refused(tiny_target, tmp_path):
    target = damaged_target(tiny_target, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer; put its tokenizer\.json beside config\.json"):
        build_engine(config_of(target, None, tmp_path))
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 310), ("hidden_size", 32)])
def test_a_head_of_another_model_is_refused_with_both_numbers(tiny_target, tiny_heads, tmp_path, field, value):
    head = tmp_path / "head"
    shutil.copytree(tiny_heads["eagle"], head)
    config = json.loads((head / "config.json").read_text())
    mine = config[field]
    (head / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError) as error:
        build_engine(config_of(tiny_target, head, tmp_path))
    assert str(value) in str(error.value)
    assert str(mine) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def engine(tiny_target, tiny_heads, tmp_path):
    return build_engine(config_of(tiny_target, tiny_heads["medusa"], tmp_path)).path


def test_a_changed_file_is_refused_at_load_with_its_name(engine):
    path = engine / "rank0.safetensors"
    weights = load_file(path)
    weights["target.norm.weight"] += 1
    save_file(weights, path)
    with pytest.raises(
        EngineMismatch, match=r"rank0\.safetensors has changed since it was built; build the engine again"
    ):
        read_engine(engine)


DAMAGE = {
    "missing weights": (lambda path: (path / "rank0.safetensors").unlink(), "rank0.safetensors is missing"),
    "missing manifest": (lambda path: (path / "manifest.json").unlink(), "is not an engine"),
    "broken manifest": (lambda path: (path / "manifest.json").write_text("{"), "is damaged"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text("{}"), "has engine format None"),
    "partial manifest": (lambda path: (path / "manifest.json").write_text('{"format": 1}'), "is damaged"),
    "no directory": (shutil.rmtree, "there is no engine directory at"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_engine_is_refused_in_one_sentence(engine, name):
    damage, sentence = DAMAGE[name]
    damage(engine)
    with pytest.raises(FurcateError) as error:
        read_engine(engine)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
