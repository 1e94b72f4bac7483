"""Heads that do not fit: another target's, damaged, or of an unknown layout. One sentence each."""

import json
from dataclasses import replace

import pytest
import torch

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.errors import CheckpointError

KINDS = ["eagle3", "eagle", "medusa", "hydra"]


@pytest.mark.parametrize("kind", KINDS)
def test_head_for_another_hidden_size_names_both(kind, request, write_head, target):
    other = replace(target, hidden_size=128)
    with pytest.raises(CheckpointError, match=r"head for hidden size 64 .* but the target's is 128"):
        read_head(write_head(request.getfixturevalue(kind)), target=other)


@pytest.mark.parametrize("kind", KINDS)
def test_head_for_another_vocabulary_names_both(kind, request, write_head, target):
    other = replace(target, vocab_size=128)
    with pytest.raises(CheckpointError, match=r"head for a vocabulary of 96 tokens .* but the target has 128"):
        read_head(write_head(request.getfixturevalue(kind)), target=other)


def test_embedding_of_another_vocabulary_names_both(eagle, write_head, target, random_tensor):
    eagle.tensors["embed_tokens.weight"] = random_tensor(100, 64)
    with pytest.raises(
        CheckpointError, match=r"vocabulary of 100 tokens \(embed_tokens\.weight\), but the target has 96"
    ):
        read_head(write_head(eagle), target=target)


def test_narrow_head_without_embedding_is_refused(eagle3, write_head, target, random_tensor):
    eagle3.tensors["fc.weight"] = random_tensor(64, 240)
    eagle3.config["target_hidden_size"] = 80
    with pytest.raises(CheckpointError, match=r"hidden size 64 \(a head without its own embed_tokens\)"):
        read_head(write_head(eagle3), target=replace(target, hidden_size=80))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 6]},
            r"fc\.weight reads 3 target layers, but config\.json names \[2, 6\]",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, 12]}, "inputs of layers 2, 6, 12, but the target has 12 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, "a"]}, "layer numbers are expected"),
        ({"draft_vocab_size": 32}, r"lm_head\.weight has 24 rows where config\.json has draft_vocab_size 32"),
        ({"num_hidden_layers": 2}, "has 2 decoder layers; heads of one are supported"),
        ({"model_type": "deepseek_v3"}, "a head of model_type 'deepseek_v3' is not supported"),
        ({"attention_bias": True}, "announces attention biases, but none are stored"),
        ({"norm_output": False}, "no norm before lm_head"),
        ({"norm_before_fc": True, "fc_norm": True}, "both norm_before_fc and fc_norm"),
        ({"norm_before_fc": True}, r"holds no tensor 'input_norm\.weight'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: False; only True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step: 4; only 1"),
        ({"target_hidden_size": 80}, r"hidden size 80 \(target_hidden_size in config\.json\), but the target's is 64"),
        ({"target_hidden_size": 64, "eagle_config": {"target_hidden_size": 80}}, "says target_hidden_size twice"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not supported"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            r"not a valid configuration: Missing required keys .*'linear': {'factor'}",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"speculators_model_type": "mlp"}, "speculators head of type 'mlp'; supported is 'eagle3'"),
    ],
)
def test_eagle3_settings_that_cannot_be_served_are_refused(eagle3, write_head, target, settings, sentence):
    eagle3.config |= settings
    with pytest.raises(CheckpointError, match=sentence):
        read_head(write_head(eagle3), target=target)


def test_norm_before_fc_that_the_configuration_forgot_is_refused(eagle3, write_head, target, random_tensor):
    eagle3.tensors["input_norm.weight"] = random_tensor(192)
    with pytest.raises(CheckpointError, match=r"does not know: 'input_norm\.weight'"):
        read_head(write_head(eagle3), target=target)


def test_wrong_shape_names_the_file_and_both_shapes(eagle3, write_head, target, random_tensor):
    eagle3.tensors["midlayer.mlp.down_proj.weight"] = random_tensor(64, 100)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: .*down_proj\.weight' is \[64, 100\] .* \[64, 112\]"
    ):
        read_head(write_head(eagle3), target=target)


def test_weights_in_eight_bits_are_refused(eagle3, write_head, target):
    eagle3.tensors["fc.weight"] = eagle3.tensors["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(
        CheckpointError, match=r"'fc\.weight' is float8_e4m3fn; allowed are float32, float16 and bfloat16"
    ):
        read_head(write_head(eagle3), target=target)


def test_unknown_layout_names_what_it_found(eagle, write_head, target, random_tensor):
    eagle.tensors = {"mlp_speculator.proj.0.weight": random_tensor(4, 4)}
    with pytest.raises(
        CheckpointError, match=r"no known head layout \(its first tensors: mlp_speculator\.proj\.0\.weight\)"
    ):
        read_head(write_head(eagle), target=target)


def test_file_instead_of_a_directory_is_refused(eagle, write_head, target):
    file = write_head(eagle) / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a directory"):
        read_head(file, target=target)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d: (d / "config.json").unlink(), r"config\.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds a JSON list"),
        (lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), r"model\.safetensors is empty"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            r"model\.safetensors is truncated or damaged",
        ),
        (
            lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0"),
            r"model\.safetensors is a Git LFS pointer",
        ),
        (
            lambda d: (d / "model.safetensors").rename(d / "model-00001-of-00002.safetensors"),
            r"model-00002-of-00002\.safetensors is missing",
        ),
        (
            lambda d: (d / "model.safetensors").rename(d / "adapter_model.safetensors"),
            r"adapter_model\.safetensors is an adapter",
        ),
    ],
)
def test_damaged_directory_names_the_file(eagle, write_head, target, damage, sentence):
    directory = write_head(eagle)
    damage(directory)
    with pytest.raises(CheckpointError, match=sentence):
        read_head(directory, target=target)


def test_index_that_promises_too_much_is_refused(eagle, write_head, target):
    directory = write_head(eagle)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"model-00001-of-00001\.safetensors is missing, though model\.safetensors"
    ):
        read_head(directory, target=target)
    index.write_text(json.dumps({"weight_map": {"fc.scale": "model.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors does not hold 'fc\.scale', which the index promises"
    ):
        read_head(directory, target=target)


def test_pickle_with_code_is_refused(eagle, write_head, target):
    eagle.tensors = {"fc.weight": print}
    directory = write_head(eagle, file="pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged, or holds more than tensors"):
        read_head(directory, target=target, allows_pickle=True)


def test_truncated_pickle_is_refused(eagle, write_head, target):
    file = write_head(eagle, file="pytorch_model.bin") / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is truncated or damaged"):
        read_head(file.parent, target=target, allows_pickle=True)
