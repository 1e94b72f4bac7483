"""Targets that cannot be served, each with its reason in one sentence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, RecurrentGemmaConfig, T5Config

from furcate.builder.checkpoints.target import read_target
from furcate.builder.errors import CheckpointError


@pytest.fixture(scope="module")
def llama_files(tmp_path_factory) -> tuple[dict, dict]:
    """config.json and tensors of a small Llama."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


@pytest.fixture
def llama(llama_files, tmp_path):
    """Writes the small Llama with some settings changed (None removes one), and returns its directory."""

    def write(**settings) -> Path:
        config, tensors = llama_files
        config = {name: value for name, value in {**config, **settings}.items() if value is not None}
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors")
        return directory

    return write


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model_type": "gpt2"}, "is of model_type 'gpt2'; supported are llama, mistral, qwen2"),
        ({"model_type": None}, "is of model_type 'None'"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "hybrid or recurrent .*'linear_attention'"),
        (
            {"model_type": "falcon_h1", "mamba_d_conv": 4},
            "hybrid or recurrent model .falcon_h1: config.json has mamba_d_conv",
        ),
        ({"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"]}}, "hybrid or recurrent"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "is a multimodal model"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"is quantised \(gptq\); read are fp8 and int4 weights"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification; a causal"),
        ({"mlp_bias": True}, "mlp_bias: true; only MLPs without bias"),
        (
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}},
            "rope scaling 'axial' is not supported; allowed are",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rotates 0.5 of each attention head",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "not a valid configuration: Missing required keys",
        ),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported; allowed are silu"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads and 3 key-value heads"),
        ({"intermediate_size": 40}, r"gate_proj\.weight' is \[48, 32\] .* \[40, 32\]"),
        ({"num_hidden_layers": 2}, r"holds no tensor 'model\.layers\.1\.input_layernorm\.weight'"),
        ({"attention_bias": True}, r"holds no tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"),
        ({"hidden_size": "big"}, r"config\.json is not a valid configuration"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(llama, settings, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        read_target(llama(**settings))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [(T5Config(), "is an encoder-decoder model .t5."), (RecurrentGemmaConfig(), "hybrid or recurrent model")],
)
def test_other_kinds_of_models_are_refused_with_their_reason(config, sentence, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=sentence):
        read_target(tmp_path)


def test_tensor_that_llama_does_not_have_is_refused(llama, llama_files):
    directory = llama()
    extra = {**llama_files[1], "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    save_file(extra, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not know: 'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        read_target(directory)


def test_missing_shard_names_it(llama, llama_files):
    directory = llama()
    (directory / "model.safetensors").rename(directory / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        read_target(directory)


def test_checkpoints_own_code_is_never_run(llama):
    directory = llama(auto_map={"AutoConfig": "evil.Evil"})
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    assert read_target(directory).spec.architecture == "LlamaForCausalLM"


def test_path_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is neither a directory nor a GGUF file"):
        read_target(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_target(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config\.json but GGUF files; give the path of one"):
        read_target(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", r"model\.gguf is empty"),
        (b"version https://git-lfs.github.com/spec/v1", r"model\.gguf is a Git LFS pointer"),
        (b"not a gguf file", r"model\.gguf is not a GGUF file"),
        (b"GGUF\x03\x00\x00\x00\x01\x00", r"model\.gguf could not be read as GGUF"),
    ],
)
def test_damaged_gguf_is_refused(tmp_path, content, sentence):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence):
        read_target(tmp_path / "model.gguf")
