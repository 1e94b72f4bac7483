"""What a server's messages mean: whose fault it was, in our words."""

import re

from furcate.builder.errors import FurcateError, RequestError, ServerError

_WRAPPING = re.compile(r"^\s*(?:\[StatusCode\.\w+\]\s*|\[request id: [^\]]*\]\s*|in ensemble '[^']*',\s*)")
_APPENDIX = re.compile(r"\s*NOTE: Setting a non-zero max_batch_size.*$", re.S)
_SERVER_FAULTS = re.compile(
    r"^Server fault:|stub process|not healthy|unknown model|is not ready|shutting down|is stopping|unavailable", re.I
)


def plain_message(message: str) -> str:
    """The sentence without what Triton puts around it."""
    while (match := _WRAPPING.match(message)) is not None:
        message = message[match.end() :]
    return _APPENDIX.sub("", message).strip() or "The server gave an error without a message."


def error_from_message(message: str) -> FurcateError:
    """RequestError, or ServerError when the server failed; Triton's streams carry no error code, only the message."""
    plain = plain_message(message)
    if _SERVER_FAULTS.search(plain):
        return ServerError(plain)
    return RequestError(plain)


def unreachable(url: str, detail: str) -> ServerError:
    """The error for a server that does not answer."""
    return ServerError(f"No server answers at {url} ({detail}); start one with: furcate serve REPOSITORY.")


def broke_off(url: str, detail: str) -> ServerError:
    """The error for a server that was there and went away in mid-answer."""
    return ServerError(
        f"The server at {url} broke off before the answer was complete ({detail}); send the request again."
    )
