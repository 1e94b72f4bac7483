"""EAGLE-1 and EAGLE-2 heads."""

import pytest
import torch

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import HeadKind


def test_safeailab_layout_is_read(eagle, write_head, target):
    head = read_head(write_head(eagle), target=target)
    assert head.warnings == ()
    assert head.spec.kind is HeadKind.EAGLE
    assert head.spec.feature_layers == (12,)
    assert (head.spec.has_fc_bias, head.spec.owns_embedding, head.spec.owns_lm_head) == (True, True, False)
    assert head.spec.decoder is not None
    assert head.spec.decoder.max_positions == target.max_positions
    assert "layers.0.input_norm.weight" not in head.weights
    fused = [eagle.tensors[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(head.weights["layers.0.qkv.weight"], torch.cat(fused))


def test_pickled_head_equals_the_safetensors_one_and_must_be_asked_for(eagle, write_head, target):
    reference = read_head(write_head(eagle, "reference"), target=target)
    pickled = write_head(eagle, "pickled", "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, which can hold more than tensors"):
        read_head(pickled, target=target)
    head = read_head(pickled, target=target, allows_pickle=True)
    assert head.spec == reference.spec
    assert all(torch.equal(head.weights[name], reference.weights[name]) for name in reference.weights)


@pytest.mark.parametrize(("said", "has_bias"), [(False, False), (None, False), (None, True)])
def test_fc_bias_is_told_by_the_stored_tensors(eagle, write_head, target, said, has_bias):
    del eagle.config["bias"]
    if said is not None:
        eagle.config["bias"] = said
    if not has_bias:
        del eagle.tensors["fc.bias"]
    head = read_head(write_head(eagle), target=target)
    assert head.spec.has_fc_bias is has_bias
    assert ("fc.bias" in head.weights) is has_bias


@pytest.mark.parametrize("said", [True, False])
def test_fc_bias_that_contradicts_the_configuration_is_refused(eagle, write_head, target, said):
    eagle.config["bias"] = said
    if said:
        del eagle.tensors["fc.bias"]
    there = "is not" if said else "is"
    with pytest.raises(CheckpointError, match=rf"bias: {str(said).lower()}, but fc\.bias {there} stored"):
        read_head(write_head(eagle), target=target)


def test_attention_biases_of_a_qwen2_head_are_read(eagle, write_head, target, random_tensor):
    eagle.config |= {"model_type": "qwen2", "qkv_bias": True}
    sizes = {"q": 64, "k": 32, "v": 32}
    eagle.tensors |= {f"layers.0.self_attn.{name}_proj.bias": random_tensor(size) for name, size in sizes.items()}
    head = read_head(write_head(eagle), target=target)
    fused = [eagle.tensors[f"layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    assert torch.equal(head.weights["layers.0.qkv.bias"], torch.cat(fused))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "mistral"])
def test_layer_is_llamas_whatever_target_the_configuration_was_copied_from(eagle, write_head, target, model_type):
    eagle.config |= {"model_type": model_type, "sliding_window": 32, "num_local_experts": 8}
    head = read_head(write_head(eagle), target=target)
    assert head.spec.decoder is not None
    assert (head.spec.decoder.num_experts, head.spec.decoder.sliding_window) == (None, None)
    assert head.warnings == ()


def test_input_norm_in_the_first_layer_is_refused(eagle, write_head, target, random_tensor):
    eagle.tensors["layers.0.input_layernorm.weight"] = random_tensor(64)
    with pytest.raises(CheckpointError, match=r"does not know: 'layers\.0\.input_layernorm\.weight'"):
        read_head(write_head(eagle), target=target)
