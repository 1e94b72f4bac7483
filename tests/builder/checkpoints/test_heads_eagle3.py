"""EAGLE-3: every exporter's layout of one head reads as the same head."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from furcate.builder.checkpoints.heads import HeadCheckpoint, read_head
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import HeadKind, RopeKind, RopeSpec

EXAMPLES = Path(__file__).parents[3] / "examples" / "heads"


def assert_same_weights(one: HeadCheckpoint, other: HeadCheckpoint):
    assert set(one.weights) == set(other.weights)
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name


def as_speculators(head):
    """The head as speculators saves it: nested configuration, `layers.0`, taps by the layer they enter."""
    layer_config = {
        key: value for key, value in head.config.items() if key not in ("architectures", "draft_vocab_size")
    }
    head.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 24,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "transformer_layer_config": layer_config,
    }
    return with_layers_0(head)


def with_layers_0(head):
    head.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    return head


def test_safeailab_layout_is_read_without_warnings(eagle3, write_head, target):
    head = read_head(write_head(eagle3), target=target)
    stored = eagle3.tensors
    assert head.warnings == ()
    assert head.spec.kind is HeadKind.EAGLE3
    assert head.spec.feature_layers == (2, 6, 9)
    assert (head.spec.draft_vocab_size, head.spec.vocab_size) == (24, 96)
    assert (head.spec.owns_lm_head, head.spec.owns_embedding) == (True, False)
    assert head.spec.decoder is not None
    assert head.spec.decoder.max_positions == target.max_positions  # the head's own says 128
    fused = [stored[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(head.weights["layers.0.qkv.weight"], torch.cat(fused))
    gate_up = [stored["midlayer.mlp.gate_proj.weight"], stored["midlayer.mlp.up_proj.weight"]]
    assert torch.equal(head.weights["layers.0.gate_up.weight"], torch.cat(gate_up))
    assert torch.equal(head.weights["layers.0.input_norm.weight"], stored["midlayer.input_layernorm.weight"])
    assert torch.equal(head.weights["draft_token_ids"], torch.nonzero(stored["t2d"]).flatten())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_specforge_and_angelslim_equal_safeailab(eagle3, write_head, target, architecture, prefix):
    reference = read_head(write_head(eagle3, "reference"), target=target)
    eagle3.config["architectures"] = [architecture]
    eagle3.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    eagle3.tensors = {prefix + name: tensor for name, tensor in eagle3.tensors.items()}
    head = read_head(write_head(eagle3), target=target)
    assert_same_weights(head, reference)
    assert head.spec.feature_layers == reference.spec.feature_layers == (2, 6, 9)
    assert "start with 1, so they name outputs of layers: the inputs of layers 2, 6, 9 are read" in head.warnings[0]


def test_speculators_equals_safeailab(eagle3, write_head, target):
    reference = read_head(write_head(eagle3, "reference"), target=target)
    head = read_head(write_head(as_speculators(eagle3)), target=target)
    assert_same_weights(head, reference)
    assert head.warnings == ()
    assert head.spec.decoder is not None
    decoder = replace(head.spec.decoder, architecture="LlamaForCausalLMEagle3")
    assert replace(head.spec, decoder=decoder) == reference.spec


def test_modelopt_equals_safeailab_up_to_the_tap_warning(eagle3, write_head, target):
    reference = read_head(write_head(eagle3, "reference"), target=target)
    del eagle3.tensors["t2d"]
    eagle3.config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    head = read_head(write_head(with_layers_0(eagle3)), target=target)
    assert_same_weights(head, reference)
    assert head.spec == reference.spec
    assert len(head.warnings) == 1
    assert "names no eagle_aux_hidden_state_layer_ids; the default for 12 layers is used" in head.warnings[0]


def test_speculators_switches_reach_the_spec(eagle3, write_head, target, random_tensor):
    as_speculators(eagle3)
    eagle3.config |= {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    eagle3.tensors["input_norm.weight"] = random_tensor(192)
    head = read_head(write_head(eagle3), target=target)
    assert head.spec.has_norm_before_residual
    assert head.spec.has_fc_norm
    assert head.spec.feeds_back_normed
    assert torch.equal(head.weights["fc_norm.weight"], eagle3.tensors["input_norm.weight"])


def test_a_norm_for_each_tap_is_read(eagle3, write_head, target, random_tensor):
    eagle3.config["fc_norm"] = True
    eagle3.tensors |= {f"fc_norm.{tap}.weight": random_tensor(64) for tap in range(3)}
    head = read_head(write_head(eagle3), target=target)
    assert head.spec.has_tap_norms
    assert not head.spec.has_fc_norm
    assert torch.equal(head.weights["tap_norms.2.weight"], eagle3.tensors["fc_norm.2.weight"])


def test_norm_output_of_specforge_feeds_back_unnormed_states(eagle3, write_head, target):
    eagle3.config["norm_output"] = True
    assert not read_head(write_head(eagle3), target=target).spec.feeds_back_normed


def test_qk_norms_of_a_qwen3_layer_are_read(eagle3, write_head, target, random_tensor):
    as_speculators(eagle3)
    eagle3.config["transformer_layer_config"] |= {"model_type": "qwen3", "head_dim": 16}
    eagle3.tensors |= {f"layers.0.self_attn.{name}_norm.weight": random_tensor(16) for name in "qk"}
    head = read_head(write_head(eagle3), target=target)
    assert head.spec.decoder is not None
    assert head.spec.decoder.has_qk_norm
    assert torch.equal(head.weights["layers.0.k_norm.weight"], eagle3.tensors["layers.0.self_attn.k_norm.weight"])


def test_head_of_the_whole_vocabulary_needs_no_map(eagle3, write_head, target, random_tensor):
    eagle3.config["draft_vocab_size"] = 96
    eagle3.tensors["lm_head.weight"] = random_tensor(96, 64)
    eagle3.tensors["d2t"] = torch.zeros(96, dtype=torch.int64)
    eagle3.tensors["t2d"] = torch.ones(96, dtype=torch.bool)
    head = read_head(write_head(eagle3), target=target)
    assert head.spec.draft_vocab_size == 96
    assert "draft_token_ids" not in head.weights


def test_head_without_lm_head_borrows_the_targets(eagle3, write_head, target):
    for name in ("lm_head.weight", "d2t", "t2d"):
        del eagle3.tensors[name]
    del eagle3.config["draft_vocab_size"]
    head = read_head(write_head(eagle3), target=target)
    assert not head.spec.owns_lm_head
    assert head.spec.draft_vocab_size == 96


def test_narrow_head_with_its_own_embedding_is_read(eagle3, write_head, target, random_tensor):
    wide = replace(target, hidden_size=80)
    eagle3.tensors["fc.weight"] = random_tensor(64, 240)
    eagle3.tensors["embed_tokens.weight"] = random_tensor(96, 64)
    eagle3.config["target_hidden_size"] = 80
    head = read_head(write_head(eagle3), target=wide)
    assert (head.spec.hidden_size, head.spec.target_hidden_size) == (64, 80)
    assert head.spec.owns_embedding


def test_rope_of_transformers_4_and_5_read_alike_and_a_lost_scaling_is_told(eagle3, write_head, target):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    scaled = replace(target, rope=RopeSpec(kind=RopeKind.LLAMA3, theta=500000.0, parameters=scaling))
    lost = read_head(write_head(eagle3, "lost"), target=scaled)
    expected = "the head rotates with default, theta 10000, the target with llama3, theta 500000, factor 8"
    assert expected in lost.warnings[0]

    eagle3.config |= {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **scaling}}
    old = read_head(write_head(eagle3, "old"), target=scaled)
    for name in ("rope_theta", "rope_scaling"):
        del eagle3.config[name]
    eagle3.config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    new = read_head(write_head(eagle3, "new"), target=scaled)
    for head in (old, new):
        assert head.warnings == ()
        assert head.spec.decoder is not None
        assert head.spec.decoder.rope == scaled.rope


def test_rotary_buffers_are_ignored_and_other_unknown_tensors_refused(eagle3, write_head, target, random_tensor):
    eagle3.tensors["midlayer.self_attn.rotary_emb.inv_freq"] = random_tensor(8)
    read_head(write_head(eagle3, "buffer"), target=target)
    eagle3.tensors["midlayer.self_attn.sinks"] = random_tensor(4)
    with pytest.raises(CheckpointError, match=r"tensors that its layout does not know: 'layers\.0\.self_attn\.sinks'"):
        read_head(write_head(eagle3), target=target)


def test_example_head_is_read_without_warnings(target):
    smol = replace(
        target,
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        max_positions=8192,
        rope=RopeSpec(theta=100000.0),
    )
    for name, kind in (("eagle3", HeadKind.EAGLE3), ("eagle", HeadKind.EAGLE), ("medusa", HeadKind.MEDUSA)):
        head = read_head(EXAMPLES / name, target=smol)
        assert head.spec.kind is kind
        assert head.warnings == ()
        assert all(torch.isfinite(tensor.float()).all() for tensor in head.weights.values())
    eagle3 = read_head(EXAMPLES / "eagle3", target=smol)
    assert eagle3.spec.feature_layers == (2, 15, 27)
    assert eagle3.weights["draft_token_ids"].shape == (8192,)
