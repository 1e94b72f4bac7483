"""`furcate serve`: a repository up on the real Triton server, said to be ready only after it generated something."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from furcate.builder.errors import ServerError
from furcate.client.canary import canary
from furcate.client.ports import HOST
from furcate.client.results import Generation
from furcate.client.server import ServerConfig, TritonServer


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model repository with the Triton Inference Server.

    Finds tritonserver (the nvidia-pytriton wheel, or /opt/tritonserver in NVIDIA's container), starts it on the loopback
    address (or --host), and says ready when a first generation went through. Ctrl-C or SIGTERM ends it: what is running
    finishes first.

    examples:
      furcate serve repository
      furcate serve repository --http-port 9000 --grpc-port 9001 --metrics-port 9002
      furcate serve repository --http-port auto --grpc-port auto --metrics-port auto --log-file triton.log
      furcate serve repository --host 0.0.0.0
    """

    repository: tyro.conf.Positional[Path]
    """The directory that build_engine --repository wrote."""
    http_port: str = "8000"
    """HTTP: generate, generate_stream. A number, or auto."""
    grpc_port: str = "8001"
    """gRPC: what the client library uses. A number, or auto."""
    metrics_port: str = "8002"
    """Prometheus metrics. A number, or auto."""
    host: str = HOST
    """Address of gRPC and metrics; 0.0.0.0 is all of them, as a container needs. HTTP stays on 127.0.0.1 whatever this says,
    because a JSON body of 4 MB ends the server: put a proxy that limits bodies in front of it."""
    log_file: Path | None = None
    """Triton's log; default a file in the temporary directory."""
    ready_timeout_s: float = 300.0
    """How long the models may take to load."""


class _TerminatedError(BaseException):
    """SIGTERM came."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command until a signal ends it; ServerError when the server ends by itself."""
    config = tyro.cli(ServeConfig, prog="furcate serve", args=arguments)
    server = TritonServer(
        ServerConfig(
            repository=config.repository,
            http_port=config.http_port,
            grpc_port=config.grpc_port,
            metrics_port=config.metrics_port,
            host=config.host,
            log_file=config.log_file,
            ready_timeout_s=config.ready_timeout_s,
        )
    )
    print(f"Loading {config.repository} ...", flush=True)
    with _raises_on_sigterm(), server:
        print(ready_text(server, canary(server.grpc_url)), flush=True)
        code = server.wait()
        raise ServerError(f"tritonserver ended by itself (exit code {code}); its log is {server.log_file}.")


def ready_text(server: TritonServer, generation: Generation) -> str:
    """What a person wants to know once the server is up."""
    return f"""\
Ready: a first generation gave {generation.num_tokens} tokens in {generation.duration_s:.2f} s.
  gRPC     {server.grpc_url}
  HTTP     {server.http_url}
  metrics  {server.metrics_url}
  log      {server.log_file}
Try:
  furcate generate "Why is the sky blue?" --chat --url {server.grpc_url}"""


@contextmanager
def _raises_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into the end of the with block, and a quiet one."""

    def on_sigterm(number: int, frame: object) -> None:
        raise _TerminatedError

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except _TerminatedError:
        print("Ended: SIGTERM.", flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
