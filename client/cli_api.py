"""`furcate api`: the OpenAI-compatible front end of a served model."""

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from furcate.builder.errors import ConfigError
from furcate.client.async_client import DEFAULT_DEADLINE_S
from furcate.client.ports import check_host, listening_socket


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """Serve a model over OpenAI's HTTP interface, in front of a furcate server.

    /v1/chat/completions, /v1/completions, /v1/models, /health and /openapi.json; and the ensemble's own requests, as
    clients of Triton send them: /v2/models/ensemble/generate and generate_stream. Listens on the loopback address unless
    --host says otherwise; then it wants API keys. Ctrl-C or SIGTERM ends it: what is running finishes first.

    examples:
      furcate api engines/smol
      furcate api engines/smol --url grpc://127.0.0.1:8001 --port 8080 --model-name smol
      furcate api engines/smol --host 0.0.0.0 --api-key-file keys.txt
    """

    engine: tyro.conf.Positional[Path]
    """The engine's directory (its tokenizer, chat template, name and limits), or a directory with only a tokenizer."""
    url: str = "grpc://127.0.0.1:8001"
    """The server: grpc://host:port or http://host:port."""
    host: str = "127.0.0.1"
    """The IPv4 address to listen on; 0.0.0.0 is all of this machine's."""
    port: str = "8080"
    """A number, or auto."""
    model_name: str | None = None
    """What clients call the model; default the engine's name."""
    api_key_file: Path | None = None
    """The keys of those who may ask, one a line."""
    api_key: tuple[str, ...] = ()
    """Further keys. Other users of this machine can read them in the list of processes: prefer the file."""
    without_keys: bool = False
    """Listen beyond this machine without keys, where something in front checks who asks."""
    max_body_bytes: int = 2 * 1024 * 1024
    """Longer request bodies are refused with 413."""
    max_active_requests: int = 512
    """Further requests are refused with 503."""
    default_max_tokens: int = 1024
    """Tokens of a chat answer whose request names no limit; less where the engine's context leaves less."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """How long an answer may take."""
    drain_s: float = 60.0
    """How long running answers may take to finish once a signal came."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command until a signal ends it."""
    config = tyro.cli(ApiConfig, prog="furcate api", args=arguments)
    _check(config)
    try:
        from furcate.client.api.running import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The front end needs '{error.name}'; install furcate with its api extra: pip install 'furcate[api]'."
        ) from None
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("httpx2", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with _listener(config) as listener:
        # uvicorn ends in order at a signal and then raises it again; that must not end us with an error.
        previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            asyncio.run(serve(config, listener))
        finally:
            signal.signal(signal.SIGTERM, previous)
    print("Ended.", flush=True)


def _check(config: ApiConfig) -> None:
    for option in ("max_body_bytes", "max_active_requests", "default_max_tokens", "deadline_s", "drain_s"):
        value = getattr(config, option)
        if value <= 0:
            raise ConfigError(f"--{option.replace('_', '-')} is {value:g}; it must be above 0.")
    has_keys = bool(config.api_key or config.api_key_file)
    if not config.host.startswith("127.") and not has_keys and not config.without_keys:
        raise ConfigError(
            f"--host {config.host} lets other machines in; name the keys of those who may ask with --api-key-file, or say"
            " --without-keys."
        )


def _listener(config: ApiConfig) -> socket.socket:
    check_host(config.host)
    return listening_socket("--port", config.port, config.host)
