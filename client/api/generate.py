"""/v2/models/ensemble/generate and generate_stream: Triton's generate extension, the ensemble's inputs and outputs as flat JSON.

Triton's HTTP port speaks it too, but dies of a body of 4 MB, knows no keys, and runs an answer in one piece to its end when its
client has left. Here a client that leaves ends its answer, whatever it speaks.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from furcate.builder.errors import ServerError
from furcate.client.api.errors import ApiError
from furcate.client.api.reading import read_object
from furcate.client.async_client import AsyncClient
from furcate.client.http_transport import flat_value
from furcate.client.options import tensor_from_value
from furcate.model_repository.io_table import Field
from furcate.model_repository.tables import ENSEMBLE

PARAMETERS = ("priority_level", "timeout", "response_interval_ms")
"""Whole numbers that may go beside the inputs: who comes first, microseconds until the server gives up, and for how long a
stream's tokens are gathered."""
LARGEST_PARAMETER = 2**63 - 1
_NO_SEQUENCE = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
"""What Triton says of every request that belongs to none."""
INPUTS = {each.name: each for each in ENSEMBLE.inputs}


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a body asks: the ensemble's inputs with their batch dimension, parameters, and the id that answers repeat."""

    tensors: Mapping[str, np.ndarray]
    parameters: Mapping[str, int] = field(default_factory=dict)
    request_id: str | None = None


def read_generate(body: bytes, *, is_streaming: bool) -> GenerateRequest:
    """The request; ApiError (or RequestError) names the field that is wrong, unknown or missing."""
    value = read_object(body)
    request_id, parameters = value.pop("id", None), value.pop("parameters", {})
    if request_id is not None and not isinstance(request_id, str):
        raise ApiError(400, "'id' is no string.", param="id", code="invalid_value")
    tensors = {}
    for name, item in value.items():
        if name not in INPUTS:
            raise ApiError(400, f"Unknown field '{name[:100]}'; leave it out.", param=name[:100], code="unknown_field")
        tensors[name] = tensor_from_value(INPUTS[name], item)
    ENSEMBLE.read(tensors)
    if not is_streaming and "stream" in tensors and tensors["stream"].any():
        raise ApiError(400, "'stream' is true; use generate_stream.", param="stream", code="invalid_value")
    return GenerateRequest(tensors=tensors, parameters=_parameters(parameters), request_id=request_id)


def _parameters(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ApiError(400, "'parameters' is no object.", param="parameters", code="invalid_value")
    for name, number in value.items():
        if name not in PARAMETERS:
            allowed = ", ".join(PARAMETERS)
            raise ApiError(
                400,
                f"'parameters' has '{name[:100]}'; it may have: {allowed}.",
                param="parameters",
                code="unknown_field",
            )
        if not isinstance(number, int) or isinstance(number, bool) or abs(number) > LARGEST_PARAMETER:
            raise ApiError(400, f"'{name}' is no whole number.", param="parameters", code="invalid_value")
    return value


class GenerateAnswer:
    """The answer to one request, whole or as events. Leaving it early ends it on the server."""

    def __init__(self, request: GenerateRequest, client: AsyncClient) -> None:
        self._request = request
        self._responses = client.infer(request.tensors, request.parameters)

    async def whole(self) -> str:
        """The only response, as JSON."""
        async with aclosing(self._responses) as responses:
            async for outputs in responses:
                return _json(outputs, self._request.request_id)
        raise ServerError("The server sent no answer.")

    async def events(self) -> AsyncIterator[str]:
        """Each response as JSON."""
        async with aclosing(self._responses) as responses:
            async for outputs in responses:
                yield _json(outputs, self._request.request_id)


def _json(outputs: Mapping[str, np.ndarray], request_id: str | None) -> str:
    body: dict[str, Any] = {"id": request_id} if request_id is not None else {}
    body |= {"model_name": ENSEMBLE.name, "model_version": "1", **_NO_SEQUENCE}
    for each in ENSEMBLE.outputs:
        if each.name in outputs:
            body[each.name] = flat_value(outputs[each.name])
    return json.dumps(body, ensure_ascii=False, allow_nan=False)


def request_schema(*, is_streaming: bool) -> dict[str, Any]:
    """The JSON schema of a body."""
    usable = [each for each in ENSEMBLE.inputs if each.refusal is None or each.neutral]
    properties = {each.name: _field_schema(each) for each in usable}
    if not is_streaming:
        properties["stream"] = {"const": False, "description": "generate_stream streams."}
    number = {"type": "integer", "minimum": -LARGEST_PARAMETER, "maximum": LARGEST_PARAMETER}
    properties["id"] = {"type": ["string", "null"], "description": "Comes back with the answer."}
    properties["parameters"] = {
        "type": "object",
        "properties": dict.fromkeys(PARAMETERS, number),
        "additionalProperties": False,
    }
    required = [each.name for each in ENSEMBLE.inputs if not each.is_optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def answer_schema() -> dict[str, Any]:
    """The JSON schema of an answer, and of each event's data."""
    name = {"type": "string"}
    outputs = {each.name: _field_schema(each, is_nullable=True) for each in ENSEMBLE.outputs}
    return {
        "type": "object",
        "properties": {"id": name, "model_name": name, "model_version": name, **outputs},
        "required": ["model_name", "model_version", "text_output"],
    }


_SCALARS: dict[str, dict[str, Any]] = {
    "BOOL": {"type": "boolean"},
    "STRING": {"type": "string"},
    "FP32": {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
    "INT32": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "INT64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "UINT64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
}


def _field_schema(each: Field, *, is_nullable: bool = False) -> dict[str, Any]:
    """A single value may stand for a list of one, as with Triton. Answers have null where a number is not finite."""
    scalar = _SCALARS[each.dtype]
    if is_nullable and each.dtype.startswith("FP"):
        scalar = {"type": ["number", "null"]}
    most = {"maxItems": 1, "minItems": 1} if each.shape == (1,) else {}
    return {"description": each.meaning, "anyOf": [scalar, {"type": "array", "items": scalar, **most}]}
