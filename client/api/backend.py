"""What the endpoints work with: the server, its tokenizer, the settings."""

from dataclasses import dataclass

from furcate.client.api.settings import ApiSettings
from furcate.client.api.tokens import Tokens
from furcate.client.async_client import AsyncClient


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One front end's means. The client belongs to the event loop that runs the app."""

    client: AsyncClient
    tokens: Tokens
    settings: ApiSettings
