"""Calls over HTTP: Triton's generate (one response) and generate_stream (server-sent events)."""

import json
import math
from collections.abc import AsyncIterator

import httpx2
import numpy as np

from furcate.builder.errors import RequestError
from furcate.client.messages import broke_off, error_from_message, unreachable
from furcate.client.transport import Call

CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 3_000_000
"""A JSON body of 4 MB ends Triton 2.51, so none of such a size is sent."""
_JSON = {"Content-Type": "application/json"}


class HttpTransport:
    """The server behind "http://host:port". Belongs to the event loop that first uses it."""

    def __init__(self, url: str) -> None:
        self._url = url
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._client = httpx2.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False)

    async def infer(self, call: Call) -> AsyncIterator[dict[str, np.ndarray]]:
        """The responses' tensors; the caller knows which is the last."""
        path = f"/v2/models/{call.model_name}/{'generate_stream' if call.is_streaming else 'generate'}"
        body = _body(call)
        try:
            async with self._client.stream("POST", path, content=body, headers=_JSON) as answer:
                if answer.is_error:
                    raise error_from_message(_error_text(await answer.aread(), answer.status_code))
                if call.is_streaming:
                    async for line in _lines(answer):
                        if line.startswith(b"data:"):
                            yield _tensors(line.removeprefix(b"data:").decode())
                else:
                    yield _tensors((await answer.aread()).decode())
        except httpx2.ConnectError as error:
            raise unreachable(self._url, str(error)) from None
        except httpx2.HTTPError as error:
            raise broke_off(self._url, type(error).__name__) from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


async def _lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. Not httpx's: they end at whatever Unicode ends lines with, and texts may hold that as it is."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _body(call: Call) -> bytes:
    """Triton's JSON: inputs by name, a single value bare; the batch dimension is left out. RequestError when it is too long."""
    body: dict[str, object] = {"id": call.request_id}
    for name, array in call.tensors.items():
        body[name] = flat_value(array)
    if call.parameters:
        body["parameters"] = dict(call.parameters)
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_BODY_BYTES:
        raise RequestError(
            f"The request has {len(text)} bytes as JSON, and over HTTP {MAX_BODY_BYTES} are allowed; use grpc://."
        )
    return text


def flat_value(array: np.ndarray) -> object:
    """A tensor as Triton's JSON has it: a single value bare, else a flat list; null where a number is not finite."""
    items = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    values = [None if isinstance(item, float) and not math.isfinite(item) else item for item in items]
    return values[0] if len(values) == 1 else values


def _error_text(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return f"Server fault: HTTP status {status} without a message."


def _tensors(text: str) -> dict[str, np.ndarray]:
    values = json.loads(text)
    if "error" in values:
        raise error_from_message(str(values["error"]))
    return {name: _array(value) for name, value in values.items()}


def _array(value: object) -> np.ndarray:
    items = np.asarray(value).reshape(-1)
    if items.dtype.kind == "U":
        return np.array([item.encode() for item in items.tolist()], dtype=np.object_)
    return items
