"""`furcate serve`: a repository up on the real Triton server, said to be ready only after it generated something."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from furcate.builder.errors import ConfigError
from furcate.client.canary import canary
from furcate.client.ports import HOST
from furcate.client.results import Generation
from furcate.client.server import ServerConfig, TritonServer
from furcate.client.supervisor import SupervisionConfig, Supervisor
from furcate.model_repository.json_lines import JsonLines


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model repository with the Triton Inference Server.

    Finds tritonserver (the nvidia-pytriton wheel, or /opt/tritonserver in NVIDIA's container), starts it on the loopback
    address (or --host), and says ready when a first generation went through. From then on it watches: a dead model gets a
    new process, a server that died or hangs is started again. Ctrl-C or SIGTERM ends it: new work is refused, and what is
    running finishes first (--drain-timeout-s).

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
    drain_timeout_s: float = 30.0
    """At the end: how long running requests may take to finish."""
    canary_interval_s: float = 30.0
    """Between two canary generations."""
    canary_deadline_s: float = 60.0
    """A canary without an answer for so long, while nothing else gets on, means a hung server, which is started again."""
    most_restarts: int = 5
    """Attempts in a row to start a server again, each after a longer pause, before it is given up."""
    json_log: Path | None = None
    """Add a line of JSON to this file for each event here and for each request that ends; never a prompt or a text."""
    trace_url: str | None = None
    """Send OpenTelemetry traces to this collector, such as http://127.0.0.1:4318/v1/traces."""
    trace_rate: int = 1
    """Trace one request in so many."""
    region_mb: int = 16
    """Shared memory that each model's process begins with, in MiB; /dev/shm must hold four of them."""

    def __post_init__(self) -> None:
        if self.drain_timeout_s < 0:
            raise ConfigError(f"--drain-timeout-s is {self.drain_timeout_s:g}; it must be at least 0 seconds.")
        if self.region_mb < 1:
            raise ConfigError(f"--region-mb is {self.region_mb}; it must be at least 1.")


class _TerminatedError(BaseException):
    """SIGTERM came."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command until a signal ends it; ServerError when the server cannot be kept going."""
    config = tyro.cli(ServeConfig, prog="furcate serve", args=arguments)
    supervision = SupervisionConfig(
        canary_interval_s=config.canary_interval_s,
        canary_deadline_s=config.canary_deadline_s,
        most_restarts=config.most_restarts,
    )
    server = TritonServer(_server_config(config))
    log = JsonLines(config.json_log)

    def report(event: str, sentence: str, **facts: object) -> None:
        print(sentence, flush=True)
        log.write(event, server=server.id, **facts)

    report("loading", f"Loading {config.repository} ...")
    with _raises_on_sigterm(), server:
        report("ready", ready_text(server, canary(server.grpc_url)))
        try:
            Supervisor(server, supervision, report).run()
        except (_TerminatedError, KeyboardInterrupt):
            report("draining", f"Ending: new work is refused, running work has {config.drain_timeout_s:g} s to finish.")
            is_empty = server.drain(config.drain_timeout_s)
            report("drained", "All work is finished." if is_empty else "Some work was not finished in time.")
            raise


def _server_config(config: ServeConfig) -> ServerConfig:
    return ServerConfig(
        repository=config.repository,
        http_port=config.http_port,
        grpc_port=config.grpc_port,
        metrics_port=config.metrics_port,
        host=config.host,
        log_file=config.log_file,
        json_log=config.json_log,
        ready_timeout_s=config.ready_timeout_s,
        region_bytes=config.region_mb << 20,
        trace_url=config.trace_url,
        trace_rate=config.trace_rate,
    )


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
