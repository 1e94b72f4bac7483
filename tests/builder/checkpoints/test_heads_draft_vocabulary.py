"""Draft maps: offsets read, padding dropped, everything that is no map of offsets refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.checkpoints.heads.draft_vocabulary import draft_token_ids
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.stored import StoredTensor
from furcate.builder.errors import CheckpointError


def set_map(head, ids, padding=0, has_marks=True):
    """Gives the head a map to `ids` (ascending) with `padding` unused draft ids behind it."""
    ids = torch.tensor(ids)
    offsets = torch.cat([ids - torch.arange(len(ids)), torch.zeros(padding, dtype=torch.int64)])
    head.tensors["d2t"] = offsets
    head.tensors["lm_head.weight"] = torch.randn(len(offsets), 64, generator=torch.Generator().manual_seed(3))
    head.config["draft_vocab_size"] = len(offsets)
    head.tensors.pop("t2d")
    if has_marks:
        head.tensors["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True)
    return head


@given(ids=st.sets(st.integers(0, 95), min_size=1, max_size=95))
def test_marked_maps_read_back_as_their_ascending_ids(ids, target):
    ids = torch.tensor(sorted(ids))
    tensors = {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True),
    }
    stored = {
        name: StoredTensor(tuple(tensor.shape), tensor.dtype, Path("model.safetensors"), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }
    read = draft_token_ids(HeadSource(Path("head"), {}, stored, target), len(ids))
    assert read is not None
    assert read.tolist() == ids.tolist()


@pytest.mark.parametrize("has_marks", [True, False])
def test_padded_map_is_read_and_its_padding_dropped(eagle3, write_head, target, has_marks):
    ids = [3, 4, 20, 21, 50]
    head = read_head(write_head(set_map(eagle3, ids, padding=7, has_marks=has_marks)), target=target)
    assert head.weights["draft_token_ids"].tolist() == ids
    assert head.spec.draft_vocab_size == 5
    assert torch.equal(head.weights["lm_head.weight"], eagle3.tensors["lm_head.weight"][:5])


def test_map_that_is_missing_is_refused(eagle3, write_head, target):
    del eagle3.tensors["d2t"]
    with pytest.raises(CheckpointError, match=r"drafts 24 of 96 tokens but holds no d2t map"):
        read_head(write_head(eagle3), target=target)


@pytest.mark.parametrize("has_marks", [True, False])
def test_map_of_ids_instead_of_offsets_is_refused(eagle3, write_head, target, has_marks):
    ids = [2, 5, 6, 7, 30, 31]
    set_map(eagle3, ids, has_marks=has_marks)
    eagle3.tensors["d2t"] = torch.tensor(ids)
    with pytest.raises(CheckpointError, match=r"d2t looks like target ids, where offsets .* are expected"):
        read_head(write_head(eagle3), target=target)


def test_offsets_that_look_like_ids_are_read_where_t2d_confirms_them(eagle3, write_head, target):
    every_second = list(range(0, 96, 2))
    head = read_head(write_head(set_map(eagle3, every_second)), target=target)
    assert head.weights["draft_token_ids"].tolist() == every_second


def test_map_out_of_the_vocabulary_is_refused(eagle3, write_head, target):
    set_map(eagle3, [2, 5, 6, 7], has_marks=False)
    eagle3.tensors["d2t"] = torch.tensor([2, 4, 4, 93])
    with pytest.raises(CheckpointError, match=r"d2t leads to token 96, outside the target's 96 tokens"):
        read_head(write_head(eagle3), target=target)


def test_map_in_another_order_is_refused(eagle3, write_head, target):
    set_map(eagle3, [2, 5, 6, 7], has_marks=False)
    eagle3.tensors["d2t"] = torch.tensor([5, 1, 4, 4])
    with pytest.raises(CheckpointError, match=r"not in ascending order at draft id 1 \(target ids 5, 2\)"):
        read_head(write_head(eagle3), target=target)


def test_map_that_disagrees_with_t2d_is_refused(eagle3, write_head, target):
    eagle3.tensors["t2d"][5] = False
    eagle3.tensors["t2d"][7] = True
    with pytest.raises(
        CheckpointError, match=r"t2d marks 24 tokens, d2t leads to 24, and they are not the same tokens"
    ):
        read_head(write_head(eagle3), target=target)


def test_map_of_another_length_is_refused(eagle3, write_head, target):
    eagle3.tensors["d2t"] = eagle3.tensors["d2t"][:20]
    with pytest.raises(CheckpointError, match=r"d2t is \[20\] where its lm_head has 24 rows"):
        read_head(write_head(eagle3), target=target)


def test_map_of_floats_is_refused(eagle3, write_head, target):
    eagle3.tensors["d2t"] = eagle3.tensors["d2t"].float()
    with pytest.raises(CheckpointError, match=r"'d2t' is torch\.float32; it must be int64 or int32"):
        read_head(write_head(eagle3), target=target)


def test_offsets_over_the_whole_vocabulary_are_refused(eagle3, write_head, target):
    set_map(eagle3, list(range(96)))
    eagle3.tensors["d2t"][-1] = 1
    with pytest.raises(CheckpointError, match=r"covers the whole vocabulary \(96\), yet d2t is not all zeros"):
        read_head(write_head(eagle3), target=target)
