"""Client library: `Client`, `AsyncClient`, and the types they give. Loaded when first used, so the CLI stays quick."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from furcate.client.async_client import AsyncClient as AsyncClient
    from furcate.client.results import Delta as Delta
    from furcate.client.results import Generation as Generation
    from furcate.client.sync_client import Client as Client

_HOMES = {
    "AsyncClient": "furcate.client.async_client",
    "Client": "furcate.client.sync_client",
    "Delta": "furcate.client.results",
    "Generation": "furcate.client.results",
}

__all__ = ["AsyncClient", "Client", "Delta", "Generation"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
