"""Streams of many answers through one `Texts`, which may forget any of them at any time."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from furcate.model_repository.detokenize import Texts

TEXTS = ("日本語 🌳 branch", "plain text, then END and more", "é" * 9)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_target)


def response(texts: Texts, key: int, earlier: list[int], new: list[int], reason: str) -> str:
    made = texts.outputs(
        {
            "TOKENS_BATCH": np.array([[new]], np.int32).reshape(1, 1, -1),
            "SEQUENCE_LENGTH": np.array([[len(new)]], np.int32),
            "ANSWER_KEY": np.array([[key]], np.int64),
            "EARLIER_IDS": np.array([earlier], np.int32).reshape(1, -1),
            "NUM_UNSEARCHED_IDS": np.array([[0]], np.int32),
            "FINISH_REASON": np.array([[reason.encode()]], np.object_),
            "STOP_TEXTS": np.array([[b"END"]], np.object_),
        }
    )
    assert made["OUTPUT_IDS"].tolist() == [new]
    return made["OUTPUT"][0, 0].decode()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), num_kept=st.integers(0, 3))
def test_pieces_make_the_whole_however_answers_interleave_and_are_forgotten(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject, num_kept: int
) -> None:
    texts = Texts(tokenizer, num_kept_answers=num_kept)
    ids = [tokenizer.encode(text) for text in TEXTS]
    whole = [response(Texts(tokenizer), key, [], ids[key], "length") for key in range(3)]
    assert whole[1] == "plain text, then "
    positions, shown = [0, 0, 0], ["", "", ""]
    while any(position < len(each) for position, each in zip(positions, ids, strict=True)):
        key = data.draw(st.sampled_from([k for k in range(3) if positions[k] < len(ids[k])]))
        start, end = positions[key], positions[key] + data.draw(st.integers(1, 7))
        reason = "length" if end >= len(ids[key]) else ""
        shown[key] += response(texts, key, ids[key][:start], ids[key][start:end], reason)
        positions[key] = end
    assert shown == whole


def test_tokens_alone_are_enough(tokenizer: PreTrainedTokenizerFast) -> None:
    """The old contract's two inputs: a whole answer, rows longer than their length."""
    ids = tokenizer.encode("branch 🌳")
    made = Texts(tokenizer).outputs(
        {
            "TOKENS_BATCH": np.array([[[*ids, 5, 5]]], np.int32),
            "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32),
        }
    )
    assert made["OUTPUT"].tolist() == [["branch 🌳".encode()]]
