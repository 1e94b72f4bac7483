"""One call to a Triton model, over gRPC or HTTP, as both clients need it."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np

from furcate.builder.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request. `tensors` have their batch dimension."""

    model_name: str
    tensors: Mapping[str, np.ndarray]
    request_id: str
    parameters: Mapping[str, str | int] = field(default_factory=dict)
    is_streaming: bool = False


class Transport(Protocol):
    """A way to one server."""

    def infer(self, call: Call) -> AsyncIterator[dict[str, np.ndarray]]:
        """The responses' tensors; RequestError or ServerError when there is an error instead of the next one."""
        ...

    async def close(self) -> None:
        """Gives the connections back."""
        ...


def transport_to(url: str) -> Transport:
    """The transport for "grpc://host:port" or "http://host:port"; ConfigError for any other url."""
    parts = urlsplit(url)
    if parts.scheme not in ("grpc", "http", "https") or not parts.hostname:
        raise ConfigError(f"The url is '{url}'; it must be grpc://host:port or http://host:port.")
    if parts.scheme == "grpc":
        from furcate.client.grpc_transport import GrpcTransport

        return GrpcTransport(url, parts.netloc)
    from furcate.client.http_transport import HttpTransport

    return HttpTransport(url)
