"""Token sequences as a [2, n] tensor and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furcate.builder.errors import RequestError
from furcate.model_repository.word_lists import sequences_from_tensor, tensor_from_sequences

sequences = st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple)


def test_two_sequences_by_hand() -> None:
    assert tensor_from_sequences([(5, 6), (7,)]).tolist() == [[5, 6, 7], [2, 3, -1]]
    assert tensor_from_sequences([]).shape == (2, 0)


@given(sequences)
def test_there_and_back(lists: tuple[tuple[int, ...], ...]) -> None:
    assert sequences_from_tensor("stop_words_list", tensor_from_sequences(lists)) == lists


def test_the_old_clients_empty_list_is_none() -> None:
    assert sequences_from_tensor("stop_words_list", np.array([[0], [-1]], np.int32)) == ()


@pytest.mark.parametrize("ends", [[2, 1, -1], [0, 2, 3], [2, 4, -1], [2, 2, 3], [-2, 3, -1]])
def test_ends_that_do_not_ascend_within_the_tokens_are_refused(ends: list[int]) -> None:
    with pytest.raises(RequestError, match="row 1 must hold ascending ends"):
        sequences_from_tensor("stop_words_list", np.array([[5, 6, 7], ends], np.int32))
