"""What a Triton model takes and gives, as data: the config, the checks and the documents are all made from it.

Shapes leave out the batch dimension, as config.pbtxt does; -1 is a free dimension. On the wire every tensor of these
models has one more dimension in front, and it is 1: a request carries one prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from furcate.builder.errors import RequestError

NUMPY_DTYPES: dict[str, type] = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": np.object_,
}
"""Triton's name of a data type (TYPE_ left out) and the numpy type that carries it."""

MAX_STRINGS = 1024
MAX_STRING_BYTES = 8 << 20
MAX_NUMBERS = 1 << 22
"""What one tensor may hold: a client that talks to Triton itself has nothing else in its way."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a model.

    A field with `refusal` is declared so that old clients may send it, and refused with that sentence when its value is
    anything but one of `neutral` (an empty tensor is always neutral).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    meaning: str
    is_optional: bool = False
    is_addition: bool = False
    """True for what furcate adds to the contract of the ensemble that TensorRT-LLM had."""
    known_as: str | None = None
    """The ensemble's name, where this is another model's field for it: messages use the name that clients send."""
    refusal: str | None = None
    neutral: tuple[int | float | bool | str, ...] = ()

    def renamed(self, name: str) -> "Field":
        """The same field under another model's name for it."""
        return replace(self, name=name, known_as=self.label)

    def filled_in(self) -> np.ndarray:
        """A value for an input that did not come, without batch dimension: zero, and nothing along a free dimension."""
        shape = tuple(max(size, 0) for size in self.shape)
        return np.full(shape, b"") if self.dtype == "STRING" else np.zeros(shape, NUMPY_DTYPES[self.dtype])

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.known_as or self.name

    def check(self, value: np.ndarray) -> np.ndarray:
        """`value` without its batch dimension; RequestError when its dtype or shape is not this field's."""
        expected = "[1, " + ", ".join("n" if size < 0 else str(size) for size in self.shape) + "]"
        has_rank = value.ndim == len(self.shape) + 1
        if has_rank and value.shape[0] != 1:
            raise RequestError(
                f"'{self.label}' has shape {list(value.shape)}: a request carries one prompt, so the shape must be"
                f" {expected}; send a request for each prompt."
            )
        fits = has_rank and all(want in (-1, got) for want, got in zip(self.shape, value.shape[1:], strict=True))
        if not fits:
            raise RequestError(f"'{self.label}' has shape {list(value.shape)}, but its shape must be {expected}.")
        self._check_size(value)
        wanted = np.dtype(NUMPY_DTYPES[self.dtype])
        if value.dtype != wanted and not (self.dtype == "STRING" and value.dtype.kind in "SUO"):
            raise RequestError(f"'{self.label}' is {value.dtype}, but it must be {self.dtype}.")
        return value[0]

    def _check_size(self, value: np.ndarray) -> None:
        limit = MAX_STRINGS if self.dtype == "STRING" else MAX_NUMBERS
        if value.size > limit:
            raise RequestError(f"'{self.label}' has {value.size} values; {limit} are allowed.")
        if value.dtype.kind == "O":
            num_bytes = sum(len(item) for item in value.reshape(-1) if isinstance(item, bytes | str))
            if num_bytes > MAX_STRING_BYTES:
                raise RequestError(f"'{self.label}' has {num_bytes} bytes; {MAX_STRING_BYTES} are allowed.")

    def refuse_use(self, value: np.ndarray) -> None:
        """Raises RequestError when this field may not be used and `value` (without batch dimension) uses it."""
        if self.refusal is None or value.size == 0:
            return
        if not all(_plain(item) in self.neutral for item in value.reshape(-1)[:1024]):
            raise RequestError(f"'{self.label}' cannot be used: {self.refusal}")


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """A Triton model's inputs and outputs."""

    name: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]

    def read(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inputs that came, without their batch dimension, each checked; RequestError says what is wrong."""
        found = {}
        for field in self.inputs:
            if field.name in tensors:
                value = field.check(tensors[field.name])
                field.refuse_use(value)
                found[field.name] = value
            elif not field.is_optional:
                raise RequestError(f"'{field.label}' is missing: {field.meaning}")
        return found

    def label_of(self, input_name: str) -> str:
        """What messages call an input."""
        return next(field.label for field in self.inputs if field.name == input_name)

    def outputs_from(self, values: Mapping[str, object]) -> dict[str, np.ndarray]:
        """The output tensors with their batch dimension; an AssertionError says which one of ours breaks the table."""
        assert values.keys() == {field.name for field in self.outputs}, f"{self.name} gave {sorted(values)}"
        tensors = {}
        for field in self.outputs:
            array = np.asarray(values[field.name], dtype=NUMPY_DTYPES[field.dtype])[None]
            assert array.ndim == len(field.shape) + 1, f"{self.name}.{field.name} has shape {array.shape}"
            tensors[field.name] = array
        return tensors


def text_from_bytes(field_name: str, value: object) -> str:
    """The text of one element of a STRING tensor; RequestError when it is not UTF-8."""
    if isinstance(value, str):
        return value
    assert isinstance(value, bytes)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"'{field_name}' is not UTF-8: byte {error.start} cannot be read; send UTF-8 text."
        ) from None


def _plain(item: object) -> object:
    if isinstance(item, bytes):
        return item.decode("utf-8", errors="replace")
    return item.item() if isinstance(item, np.generic) else item
