"""Triton's requests and responses as plain arrays. Runs inside Triton's Python backend."""

import json

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]


def tensors_of(request):
    """The request's inputs by name, each with its batch dimension."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parameters_of(request):
    """The request's own parameters."""
    return json.loads(request.parameters() or "{}")


def response(outputs):
    """A response with these arrays."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def error_response(message):
    """A response that carries one sentence."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
