"""A request's body read into its model; what is wrong is said by the field's name."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from furcate.client.api.errors import ApiError
from furcate.client.api.fields import REFUSALS

Model = TypeVar("Model", bound=BaseModel)

_REASONS = REFUSALS | {
    "logprobs": "only the chosen tokens' log probabilities are known, not those of alternatives; send 0 to"
    " /v1/completions, and true or false to /v1/chat/completions."
}
_NEUTRAL_ONLY = (
    "literal_error",
    "none_required",
    "too_long",
    "bool_type",
    "value_error",
    "less_than_equal",
    "greater_than_equal",
)
"""What pydantic calls a value that a type for neutral values does not admit."""
MAX_SHOWN_CHARACTERS = 100


def read_body(body: bytes, model: type[Model]) -> Model:
    """The request; ApiError names the field that is wrong, unknown, or not supported."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # The first error of a union is of its first kind; the one that got deepest into the value tells most.
        found = error.errors(include_url=False, include_context=False)
        first = found[0]["loc"][:1]
        worst = max((each for each in found if each["loc"][:1] == first), key=lambda each: len(each["loc"]))
        raise _refusal(worst["type"], worst["loc"], worst["msg"], body) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object; ApiError when it is none."""
    try:
        value = pydantic_core.from_json(body)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body is {_shown(value)}; it must be a JSON object.")
    return value


def _refusal(kind: str, loc: Sequence[str | int], sentence: str, body: bytes) -> ApiError:
    if kind == "json_invalid":
        return ApiError(400, f"The body is not JSON: {sentence.removeprefix('Invalid JSON: ')}.")
    value = read_object(body)
    path = ".".join(str(step) for step in _steps_in(value, loc, is_missing=kind == "missing"))
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown field '{path}'; leave it out.", param=path, code="unknown_field")
    if kind == "missing":
        return ApiError(400, f"The field '{path}' is missing.", param=path, code="missing_field")
    name = str(loc[0])
    if name in _REASONS and kind in _NEUTRAL_ONLY:
        return ApiError(
            400, f"'{name}' cannot be used as asked: {_REASONS[name]}", param=name, code="unsupported_value"
        )
    return ApiError(400, f"'{path}' is {_shown(_value_at(value, loc))}: {sentence}.", param=path, code="invalid_value")


def _steps_in(value: Any, loc: Sequence[str | int], *, is_missing: bool) -> list[str | int]:
    """The location without the names of union members, which are no part of the value."""
    steps: list[str | int] = []
    for index, step in enumerate(loc):
        found = _values_at(value, step)
        if found:
            value = found[0]
        elif not (is_missing and index == len(loc) - 1):
            continue
        steps.append(step)
    return steps


def _value_at(value: Any, loc: Sequence[str | int]) -> Any:
    for step in _steps_in(value, loc, is_missing=False):
        value = _values_at(value, step)[0]
    return value


def _values_at(value: Any, step: str | int) -> list[Any]:
    """The value at one step of a location, or nothing."""
    if isinstance(value, dict):
        return [value[step]] if step in value else []
    if isinstance(value, list) and isinstance(step, int):
        return value[step : step + 1]
    return []


def _shown(value: Any) -> str:
    """The value as JSON, cut short."""
    text = pydantic_core.to_json(value).decode()
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
