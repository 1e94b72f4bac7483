"""Medusa: the four layouts of one head, and Hydra's two."""

import json

import pytest
import torch
from safetensors.torch import save_file

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import HeadKind


def as_vllm(head, prefix=""):
    """The head as vLLM's loader wants it."""
    tensors = {}
    for name, tensor in head.tensors.items():
        head_index, block, *rest = name.split(".")
        plain = (
            f"blocks.{head_index}.layers.{block}.{rest[-1]}" if "linear" in rest else f"lm_heads.{head_index}.weight"
        )
        tensors[prefix + plain] = tensor
    head.tensors = tensors
    head.config = {"model_type": "medusa", "num_heads": 3, "medusa_fc_bias": True, "vocab_size": 96}
    return head


def assert_same(one, other):
    assert one.spec == other.spec
    assert set(one.weights) == set(other.weights)
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.fixture
def reference(medusa, write_head, target):
    return read_head(write_head(medusa, "reference"), target=target)


def test_own_vocabulary_heads_are_read(reference, medusa):
    assert reference.warnings == ()
    assert reference.spec.kind is HeadKind.MEDUSA
    assert (reference.spec.num_heads, reference.spec.num_blocks) == (3, 2)
    assert (reference.spec.owns_lm_head, reference.spec.feature_layers) == (True, (12,))
    assert torch.equal(reference.weights["heads.2.blocks.1.weight"], medusa.tensors["2.1.linear.weight"])
    assert torch.equal(reference.weights["heads.2.lm_head.weight"], medusa.tensors["2.2.weight"])


def test_v01_pickle_is_read_and_its_wrong_head_count_is_told(reference, medusa, write_head, target):
    medusa.config["medusa_num_heads"] = 2
    head = read_head(write_head(medusa, file="medusa_lm_head.pt"), target=target, allows_pickle=True)
    assert_same(head, reference)
    assert head.warnings == ("config.json says 2 Medusa heads, but 3 are stored: 3 are used.",)


def test_v10_merged_into_the_targets_shards_is_read(reference, medusa, tmp_path, target, random_tensor):
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps({"model_type": "llama", "medusa_num_layers": 2}))
    shards = {"model-00001-of-00002.safetensors": {"model.embed_tokens.weight": random_tensor(96, 64)}}
    shards["model-00002-of-00002.safetensors"] = {f"medusa_head.{name}": t for name, t in medusa.tensors.items()}
    for file, tensors in shards.items():
        save_file(tensors, merged / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (merged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    head = read_head(merged, target=target)
    assert_same(head, reference)
    assert head.warnings == ()


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_layout_equals_v01(reference, medusa, write_head, target, prefix):
    head = read_head(write_head(as_vllm(medusa, prefix)), target=target)
    assert_same(head, reference)


def test_vllm_layout_without_biases_gets_zeros(medusa, write_head, target):
    as_vllm(medusa)
    medusa.config["medusa_fc_bias"] = False
    medusa.tensors = {name: tensor for name, tensor in medusa.tensors.items() if not name.endswith("bias")}
    head = read_head(write_head(medusa), target=target)
    assert torch.equal(head.weights["heads.1.blocks.0.bias"], torch.zeros(64))


def test_vllm_layout_with_one_lm_head_gives_it_to_all(medusa, write_head, target):
    as_vllm(medusa)
    medusa.config["original_lm_head"] = True
    for i in (1, 2):
        del medusa.tensors[f"lm_heads.{i}.weight"]
    head = read_head(write_head(medusa), target=target)
    for i in range(3):
        assert torch.equal(head.weights[f"heads.{i}.lm_head.weight"], medusa.tensors["lm_heads.0.weight"])


@pytest.mark.parametrize("is_truncated", [True, False])
def test_token_map_in_any_order_becomes_ascending_with_its_rows(medusa, write_head, target, is_truncated):
    as_vllm(medusa)
    token_map = torch.tensor([40, 3, 95, 17])
    whole = {name: tensor.clone() for name, tensor in medusa.tensors.items() if name.startswith("lm_heads.")}
    if is_truncated:
        medusa.tensors |= {name: tensor[token_map] for name, tensor in whole.items()}
    medusa.tensors["token_map"] = token_map
    medusa.config["truncated_vocab_size"] = 4
    head = read_head(write_head(medusa), target=target)
    assert head.weights["draft_token_ids"].tolist() == [3, 17, 40, 95]
    assert head.spec.draft_vocab_size == 4
    rows = whole["lm_heads.1.weight"][torch.tensor([3, 17, 40, 95])]
    assert torch.equal(head.weights["heads.1.lm_head.weight"], rows)


@pytest.mark.parametrize(
    ("token_map", "sentence"),
    [([3, 3, 5, 9], "names a token twice"), ([3, 5, 9, 96], "names token 96, outside the target's 96")],
)
def test_token_map_that_is_no_map_is_refused(medusa, write_head, target, token_map, sentence):
    as_vllm(medusa)
    medusa.tensors["token_map"] = torch.tensor(token_map)
    with pytest.raises(CheckpointError, match=sentence):
        read_head(write_head(medusa), target=target)


def test_trainer_layout_borrows_the_targets_lm_head(reference, medusa, write_head, target):
    medusa.tensors = {name: tensor for name, tensor in medusa.tensors.items() if "linear" in name}
    head = read_head(write_head(medusa, file="medusa_lm_head.safetensors"), target=target)
    assert not head.spec.owns_lm_head
    assert set(head.weights) == {name for name in reference.weights if "lm_head" not in name}


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("1.0.linear.weight", "holds 5 Medusa blocks where 3 heads of 2 need 6"),
        ("1.0.linear.bias", r"holds no tensor '1\.0\.linear\.bias'"),
        ("1.2.weight", r"holds no tensor '1\.2\.weight'"),
    ],
)
def test_incomplete_heads_are_refused(medusa, write_head, target, missing, sentence):
    del medusa.tensors[missing]
    with pytest.raises(CheckpointError, match=sentence):
        read_head(write_head(medusa), target=target)


def test_hydra_grounded_mlp_is_read(hydra, write_head, target):
    directory = write_head(hydra, file="hydra_lm_head.pt")
    head = read_head(directory, target=target, allows_pickle=True)
    assert head.warnings == ()
    assert head.spec.kind is HeadKind.HYDRA
    assert (head.spec.num_heads, head.spec.num_blocks, head.spec.is_grounded) == (2, 2, True)
    assert head.weights["heads.1.blocks.0.weight"].shape == (64, 64 * 3)
    assert torch.equal(head.weights["heads.1.residual.weight"], hydra.tensors["hydra_mlp.1.0.res_connection.weight"])
    assert torch.equal(head.weights["heads.0.lm_head.bias"], hydra.tensors["hydra_lm_head.0.bias"])


def test_hydra_prefix_mlp_equals_mlp_but_for_its_prefix(hydra, hydra_prefix, write_head, target):
    plain = read_head(write_head(hydra, "plain"), target=target)
    head = read_head(write_head(hydra_prefix), target=target)
    assert head.spec.has_prefix_layer
    assert head.spec.decoder is not None
    assert all(torch.equal(head.weights[name], plain.weights[name]) for name in plain.weights)
    prefix = set(head.weights) - set(plain.weights)
    layer = {f"layers.0.{name}.weight" for name in ("input_norm", "qkv", "o", "post_norm", "gate_up", "down")}
    assert prefix == layer | {"norm.weight"}


def test_hydra_hidden_state_offset_moves_the_tap(hydra, write_head, target):
    hydra.config["hidden_state_offset"] = 2
    assert read_head(write_head(hydra), target=target).spec.feature_layers == (10,)


@pytest.mark.parametrize("architecture", ["cross-attn", "eagle-attn"])
def test_hydra_attention_heads_are_refused(hydra, write_head, target, architecture):
    hydra.config["hydra_head_arch"] = architecture
    with pytest.raises(CheckpointError, match=rf"hydra_head_arch '{architecture}'; supported are mlp and prefix-mlp"):
        read_head(write_head(hydra), target=target)
