"""Checks that follow from the I/O tables, and their sentences."""

import numpy as np
import pytest

from furcate.builder.errors import RequestError
from furcate.model_repository.io_table import Field, ModelTable, text_from_bytes

LIMIT = Field(name="limit", dtype="INT32", shape=(1,), meaning="How many.")
WORDS = Field(name="WORDS", dtype="STRING", shape=(-1,), meaning="Texts.", is_optional=True, known_as="words")
WIDTH = Field(
    name="width", dtype="INT32", shape=(1,), meaning="One.", is_optional=True, neutral=(1,), refusal="only 1 works."
)
TABLE = ModelTable(
    name="m", inputs=(LIMIT, WORDS, WIDTH), outputs=(Field(name="ids", dtype="INT32", shape=(-1,), meaning="Tokens."),)
)


def limit(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


def test_read_drops_the_batch_dimension_of_what_came() -> None:
    values = TABLE.read({"limit": limit(3), "WORDS": np.array([[b"a", b"b"]], np.object_)})
    assert values.keys() == {"limit", "WORDS"}
    assert values["limit"].tolist() == [3]
    assert values["WORDS"].tolist() == [b"a", b"b"]


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({}, "'limit' is missing: How many."),
        ({"limit": limit(1, 2)}, r"'limit' has shape \[1, 2\], but its shape must be \[1, 1\]\."),
        ({"limit": np.zeros(1, np.int32)}, r"'limit' has shape \[1\], but its shape must be \[1, 1\]\."),
        ({"limit": np.zeros((2, 1), np.int32)}, r"'limit' has shape \[2, 1\]: a request carries one prompt"),
        ({"limit": np.zeros((1, 1), np.int64)}, "'limit' is int64, but it must be INT32"),
        ({"limit": limit(1), "WORDS": np.zeros((1, 2), np.int32)}, "'words' is int32, but it must be STRING"),
        ({"limit": limit(1), "width": limit(2)}, "'width' cannot be used: only 1 works."),
    ],
)
def test_read_refuses_with_a_sentence(tensors: dict[str, np.ndarray], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        TABLE.read(tensors)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("WORDS", np.array([[b"a"] * 1025], np.object_), "'words' has 1025 values; 1024 are allowed."),
        ("WORDS", np.array([[b"a" * 5_000_000] * 2], np.object_), "'words' has 10000000 bytes; 8388608 are allowed."),
        ("NUMBERS", np.zeros((1, (1 << 22) + 1), np.int32), "'NUMBERS' has 4194305 values; 4194304 are allowed."),
    ],
)
def test_what_is_too_long_is_refused_unread(name: str, value: np.ndarray, sentence: str) -> None:
    numbers = Field(name="NUMBERS", dtype="INT32", shape=(-1,), meaning="Numbers.", is_optional=True)
    with pytest.raises(RequestError, match=f"^{sentence}$"):
        ModelTable(name="m", inputs=(WORDS, numbers), outputs=()).read({name: value})


@pytest.mark.parametrize("value", [limit(1), np.zeros((1, 0), np.int32).reshape(1, 0)])
def test_neutral_and_empty_values_use_nothing(value: np.ndarray) -> None:
    WIDTH.refuse_use(value[0])
    with pytest.raises(RequestError):
        WIDTH.refuse_use(np.full((1,), 7, np.int32))


def test_outputs_get_dtype_and_batch_dimension_and_are_held_to_the_table() -> None:
    assert TABLE.outputs_from({"ids": [4, 5]})["ids"].tolist() == [[4, 5]]
    assert TABLE.outputs_from({"ids": []})["ids"].shape == (1, 0)
    assert TABLE.outputs_from({"ids": []})["ids"].dtype == np.int32
    with pytest.raises(AssertionError):
        TABLE.outputs_from({"ids": [[4]]})
    with pytest.raises(AssertionError):
        TABLE.outputs_from({"ids": [4], "more": [1]})


def test_text_that_is_not_utf8_is_refused_with_its_place() -> None:
    assert text_from_bytes("words", "é".encode()) == "é"
    with pytest.raises(RequestError, match="'words' is not UTF-8: byte 1 cannot be read"):
        text_from_bytes("words", b"a\xe9")
