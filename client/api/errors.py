"""Errors as clients know them: OpenAI's {"error": {"message", "type", "param", "code"}}, below /v2/ Triton's {"error": "..."}."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel
from starlette.responses import Response

from furcate.builder.errors import FurcateError, RequestError

_CONTEXT_SENTENCE = "this engine's limit is"
"""What the server says of a prompt and max_tokens that do not fit (`furcate.decoding.limits`)."""

TRITON_PATHS = "/v2/"
"""What is asked for here is asked in Triton's words."""

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "not_found_error", "server_error", "overloaded_error"
]


class ErrorDetail(BaseModel):
    """What went wrong, in a sentence."""

    message: str
    type: ErrorType
    param: str | None
    """The request's field that is to blame."""
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class TritonErrorBody(BaseModel):
    """The same below /v2/."""

    error: str


class ApiError(FurcateError):
    """An error with its HTTP status. `param` names the field to blame, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(
            error=ErrorDetail(message=message, type=_type_of(status), param=param, code=code or _code_of(status))
        )

    def text(self, path: str) -> str:
        """The JSON that whoever asked for this path understands."""
        if path.startswith(TRITON_PATHS):
            return TritonErrorBody(error=self.body.error.message).model_dump_json()
        return self.body.model_dump_json()

    def response(self, path: str) -> Response:
        """The HTTP answer to a request for this path."""
        return Response(self.text(path), status_code=self.status, headers=self.headers, media_type="application/json")


def api_error_from(error: FurcateError) -> ApiError:
    """The same error for HTTP: a refused request is 400, a server that fails behind this one 502."""
    if isinstance(error, ApiError):
        return error
    sentence = str(error)
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if _CONTEXT_SENTENCE in sentence else None
        return ApiError(400, sentence[:1].upper() + sentence[1:], code=code)
    return ApiError(502, sentence)


def internal_error() -> ApiError:
    """A fault of this program; its details are for the log only."""
    return ApiError(500, "The front end failed on this request; see its log.")


def _type_of(status: int) -> ErrorType:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status == 503:
        return "overloaded_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _code_of(status: int) -> str | None:
    return {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 503: "overloaded"}.get(status)
