"""Options to tensors."""

import numpy as np
import pytest

from furcate.builder.errors import RequestError
from furcate.client.options import parameters_from_options, tensors_from_options


def test_options_become_the_ensembles_inputs() -> None:
    tensors = tensors_from_options("Hé", {"temperature": 0.5, "seed": 2**64 - 1, "stop": ["a", "b"], "chat": True})
    assert {name: (array.dtype.kind, array.shape) for name, array in tensors.items()} == {
        "text_input": ("O", (1, 1)),
        "max_tokens": ("i", (1, 1)),
        "temperature": ("f", (1, 1)),
        "seed": ("u", (1, 1)),
        "stop_words": ("O", (1, 2)),
        "apply_chat_template": ("b", (1, 1)),
    }
    assert tensors["text_input"].tolist() == [["Hé".encode()]]
    assert tensors["seed"].item() == 2**64 - 1
    assert tensors["stop_words"].tolist() == [[b"a", b"b"]]


def test_none_is_left_to_the_server() -> None:
    assert tensors_from_options("a", {"seed": None}).keys() == {"text_input", "max_tokens"}


def test_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"Unknown option 'temprature'; the options are: .*\btemperature\b"):
        tensors_from_options("a", {"temprature": 1.0})


def test_priority_and_timeout_become_parameters_and_no_tensors() -> None:
    options = {"priority": -7, "timeout_s": 1.5, "seed": 3}
    assert parameters_from_options(options) == {"priority_level": -7, "timeout": 1_500_000}
    assert tensors_from_options("a", options).keys() == {"text_input", "max_tokens", "seed"}
    assert parameters_from_options({"priority": None, "timeout_s": None}) == {}


@pytest.mark.parametrize("timeout_s", [0, -1.0, 1e-7, 1e10, float("nan"), "1"])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: object) -> None:
    with pytest.raises(RequestError, match=r"'timeout_s' is .*; it must be from 1e-06 to 1e\+09 seconds"):
        parameters_from_options({"timeout_s": timeout_s})


@pytest.mark.parametrize("priority", [1.5, "high", 2**31])
def test_a_priority_that_is_no_whole_number_is_refused(priority: object) -> None:
    with pytest.raises(RequestError, match=r"'priority' is .*, which is no INT32 value"):
        parameters_from_options({"priority": priority})


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("max_tokens", 2**31, "INT32"),
        ("max_tokens", 1.5, "INT32"),
        ("max_tokens", "ten", "INT32"),
        ("seed", -1, "UINT64"),
        ("temperature", "hot", "FP32"),
        ("temperature", float("inf"), "FP32"),
        ("temperature", 1e39, "FP32"),
        ("stop", 3, "STRING"),
        ("text_input", "\ud800", "STRING"),
    ],
)
def test_value_that_does_not_fit_is_refused(name: str, value: object, dtype: str) -> None:
    with pytest.raises(RequestError, match=f"which is no {dtype} value"):
        tensors_from_options("a", {name: value})


def test_rank_two_inputs_keep_their_rows() -> None:
    assert tensors_from_options("a", {"lora_config": [[1, 2, 3], [4, 5, 6]]})["lora_config"].shape == (1, 2, 3)
    assert np.issubdtype(tensors_from_options("a", {"end_id": -1})["end_id"].dtype, np.int32)
