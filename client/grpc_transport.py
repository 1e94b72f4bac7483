"""Calls over gRPC: one ModelStreamInfer for each request, all on one channel."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from grpc import StatusCode
from grpc.aio import AioRpcError
from tritonclient.grpc import InferInput, aio
from tritonclient.utils import np_to_triton_dtype

from furcate.client.messages import broke_off, error_from_message, unreachable
from furcate.client.transport import Call


class GrpcTransport:
    """The server behind "grpc://host:port". Belongs to the event loop that first uses it."""

    def __init__(self, url: str, address: str) -> None:
        self._url = url
        self._client = aio.InferenceServerClient(address)

    async def infer(self, call: Call) -> AsyncIterator[dict[str, np.ndarray]]:
        """The responses' tensors, without end when the server sends none: the caller knows which is the last."""
        responses: Any = self._client.stream_infer(_requests(call))
        has_answered = False
        try:
            async for result, error in responses:
                if error is not None:
                    raise error_from_message(str(error.message()))
                has_answered = True
                yield _tensors(result)
        except AioRpcError as error:
            status, detail = error.code(), (error.details() or "no detail").splitlines()[0]
            if status is StatusCode.UNAVAILABLE and not has_answered and "connect" in detail:
                raise unreachable(self._url, "connection refused") from None
            raise broke_off(self._url, status.name) from None
        finally:
            responses.cancel()

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()


async def _requests(call: Call) -> AsyncIterator[dict[str, Any]]:
    parameters = dict(call.parameters)
    yield {
        "model_name": call.model_name,
        "inputs": [_input(name, array) for name, array in call.tensors.items()],
        "request_id": call.request_id,
        "timeout": parameters.pop(
            "timeout", None
        ),  # a field of its own to NVIDIA's client, which refuses the parameter
        "parameters": parameters,
    }


def _input(name: str, array: np.ndarray) -> InferInput:
    tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _tensors(result: Any) -> dict[str, np.ndarray]:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
