"""Triton's requests and responses as plain arrays. Runs inside Triton's Python backend."""

import json

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]


def tensors_of(request):
    """The request's inputs by name, each with its batch dimension."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parameters_of(request):
    """The request's own parameters."""
    return json.loads(request.parameters() or "{}")


def response(outputs, names=None):
    """A response with these arrays, or those of them that are named."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in names or outputs])


def error_response(message):
    """A response that carries one sentence."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
