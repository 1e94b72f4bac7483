"""What a caller may ask for, and the tensors that say it."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from furcate.builder.errors import RequestError
from furcate.model_repository.io_table import NUMPY_DTYPES, Field
from furcate.model_repository.tables import ENSEMBLE

DEFAULT_MAX_TOKENS = 256


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; what is left out is the server's default (greedy).

    Every other input of the ensemble can be given under its own name too.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    chat: bool
    """Put the prompt into the target's chat template as a user's message."""
    stop: Sequence[str]
    """The text ends before the first of these."""
    bad_words: Sequence[str]
    min_tokens: int
    end_id: int
    """-1 never ends the text before max_tokens."""
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    return_log_probs: bool
    exclude_input_in_output: bool
    priority: int
    """Requests of a larger one are served first, from -100 to 100; 0 is usual."""
    timeout_s: float
    """The server ends the request, with an error, when it takes longer, the time in line included."""


_PARAMETERS = ("priority", "timeout_s")
"""Options that go with a request as parameters, not as tensors."""
_PRIORITY = Field(name="priority", dtype="INT32", shape=(1,), meaning="Which requests come first.")
SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 1e-6, 1e9
"""Triton counts in whole microseconds."""
_INPUT_NAMES = {"chat": "apply_chat_template", "stop": "stop_words"}
_FIELDS = {field.name: field for field in ENSEMBLE.inputs}


def tensors_from_options(prompt: str, options: Mapping[str, object]) -> dict[str, np.ndarray]:
    """The ensemble's inputs by name, each with its batch dimension; RequestError names an option that is not known."""
    tensors = {
        "text_input": tensor_from_value(_FIELDS["text_input"], prompt),
        "max_tokens": tensor_from_value(_FIELDS["max_tokens"], DEFAULT_MAX_TOKENS),
    }
    for option, value in options.items():
        if option in _PARAMETERS:
            continue
        name = _INPUT_NAMES.get(option, option)
        if name not in _FIELDS:
            raise RequestError(
                f"Unknown option '{option}'; the options are: {', '.join(sorted({*_INPUT_NAMES, *_PARAMETERS, *_FIELDS}))}."
            )
        if value is not None:
            tensors[name] = tensor_from_value(_FIELDS[name], value)
    return tensors


def parameters_from_options(options: Mapping[str, object]) -> dict[str, int]:
    """The request's parameters; RequestError when a value is not right. The server checks the priority's range."""
    parameters = {}
    priority, timeout_s = options.get("priority"), options.get("timeout_s")
    if priority is not None:
        parameters["priority_level"] = int(tensor_from_value(_PRIORITY, priority).item())
    if timeout_s is not None:
        if not isinstance(timeout_s, int | float) or not SHORTEST_TIMEOUT_S <= timeout_s <= LONGEST_TIMEOUT_S:
            raise RequestError(
                f"'timeout_s' is {timeout_s!r:.100}; it must be from {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:g}"
                " seconds."
            )
        parameters["timeout"] = round(timeout_s * 1e6)
    return parameters


def tensor_from_value(field: Field, value: object) -> np.ndarray:
    """`value` as the field's dtype, shape [1, ...]; RequestError when it does not fit in."""
    try:
        if field.dtype == "STRING":
            items = [value] if isinstance(value, str | bytes) else list(value)  # pyright: ignore[reportArgumentType]
            if isinstance(value, Mapping) or not all(isinstance(item, str | bytes) for item in items):
                raise TypeError("no texts")
            encoded = [item.encode() if isinstance(item, str) else item for item in items]
            array = np.array(encoded, dtype=np.object_)
        else:
            given = np.asarray(value)
            dtype = np.dtype(NUMPY_DTYPES[field.dtype])
            if given.size and (given.dtype.kind == "b") != (dtype.kind == "b"):
                raise TypeError("truth values are no numbers")
            with np.errstate(over="ignore"):
                array = given.astype(dtype, casting="same_kind" if dtype.kind in "fb" else "unsafe")
            if not (np.all(np.isfinite(array)) if dtype.kind == "f" else np.array_equal(array, given)):
                raise ValueError("not finite, or out of range")
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
        raise RequestError(f"'{field.name}' is {value!r:.100}, which is no {field.dtype} value.") from None
    return array.reshape(1, -1) if len(field.shape) == 1 else array[None]
