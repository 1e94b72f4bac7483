"""Runs the front end's app on a listening socket until a signal ends it."""

import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from furcate.builder.errors import ConfigError
from furcate.client.api.app import build_app
from furcate.client.api.backend import Backend
from furcate.client.api.keys import keys_from
from furcate.client.api.settings import MAX_HEADER_BYTES, ApiSettings
from furcate.client.api.tokens import Tokens
from furcate.client.async_client import AsyncClient

if TYPE_CHECKING:
    from furcate.client.cli_api import ApiConfig

KEEP_ALIVE_S = 30


async def serve(config: "ApiConfig", listener: socket.socket) -> None:
    """Returns once a signal came and what was running has finished; raises ConfigError for what cannot be used."""
    settings = settings_from(config)
    tokens = Tokens(tokenizer_directory(config.engine))
    client = AsyncClient(config.url, deadline_s=config.deadline_s)
    app = build_app(Backend(client=client, tokens=tokens, settings=settings))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(config.drain_s),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )
    host, port = listener.getsockname()
    keys = f"{len(settings.api_keys)} API keys" if settings.api_keys else "no API keys"
    print(
        f"Listening: http://{host}:{port}/v1  model '{settings.model_name}', {keys}, in front of {config.url}",
        flush=True,
    )
    await server.serve(sockets=[listener])


def settings_from(config: "ApiConfig") -> ApiSettings:
    """The settings: what the command line says, and what the engine's manifest knows."""
    manifest = _manifest(config.engine)
    name = config.model_name or str(manifest.get("name") or config.engine.resolve().name)
    return ApiSettings(
        model_name=name,
        created=int((config.engine / "manifest.json").stat().st_mtime) if manifest else int(time.time()),
        api_keys=keys_from(config.api_key, config.api_key_file),
        max_body_bytes=config.max_body_bytes,
        max_active_requests=config.max_active_requests,
        default_max_tokens=config.default_max_tokens,
        max_context_tokens=manifest.get("max_context_tokens"),
    )


def tokenizer_directory(engine: Path) -> Path:
    """Where the tokenizer lies: an engine's own folder for it, or the directory itself."""
    inner = engine / "tokenizer"
    return inner if inner.is_dir() else engine


def _manifest(engine: Path) -> dict[str, Any]:
    """An engine's manifest; empty for a directory that is no engine."""
    if not engine.is_dir():
        raise ConfigError(
            f"'{engine}' is no directory; name the engine that build_engine wrote, or one with a tokenizer."
        )
    try:
        return json.loads((engine / "manifest.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{engine / 'manifest.json'}' cannot be read ({type(error).__name__}).") from None
