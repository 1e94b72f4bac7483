"""Starts the real tritonserver on a repository, knows when it is ready, and keeps it going: see also `Supervisor`."""

import json
import os
import shutil
import tempfile
import time
import urllib.request
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

from furcate.builder.errors import ConfigError, ServerError
from furcate.client.installation import Installation, find_installation
from furcate.client.ports import ALL_ADDRESSES, HOST, Ports, check_host, resolve_ports
from furcate.client.server_control import CONTROL_HEADER, RESTRICTED, counter_sum, load_again
from furcate.client.server_log import failure_in_log
from furcate.client.server_process import ServerProcess
from furcate.client.shared_memory import SharedRegions, check_room, remove_stale_regions
from furcate.model_repository.supervision import DRAIN_FILE, JSON_LOG

EXIT_TIMEOUT_S = 5
"""How long Triton waits at its end for what is still open; then it goes."""
KEEPING_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc's settings for the server and its models: memory that a step took is kept for the next, neither given back nor asked for
again. What is resident rises to what the largest steps need, and stays there."""
READY_POLL_S = 0.05
DRAIN_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What to serve and where. A port may be "auto"."""

    repository: Path
    http_port: int | str = 8000
    grpc_port: int | str = 8001
    metrics_port: int | str = 8002
    host: str = HOST
    """The address of gRPC and metrics. HTTP stays on the loopback address: a JSON body of 4 MB ends Triton 2.51."""
    log_file: Path | None = None
    """Triton's log; a fresh file in the temporary directory when None."""
    json_log: Path | None = None
    """Where a line of JSON is added for each request that ends; without prompts and texts. None writes none."""
    ready_timeout_s: float = 300.0
    """How long the models may take to load."""
    region_bytes: int = 16 << 20
    """Shared memory that each Python model begins with; it grows as tensors need it."""
    trace_url: str | None = None
    """Where traces go: an OpenTelemetry collector's HTTP address. None traces nothing."""
    trace_rate: int = 1
    """One request in so many is traced."""

    def __post_init__(self) -> None:
        if self.trace_rate < 1:
            raise ConfigError(f"--trace-rate is {self.trace_rate}; it must be at least 1: one request in so many.")
        if self.trace_url is not None and not self.trace_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--trace-url is '{self.trace_url}'; it must be an address such as http://127.0.0.1:4318/v1/traces."
            )


class TritonServer:
    """A tritonserver process of our own; as a context manager it is stopped at the end.

    It dies with this process, and what it leaves in shared memory is removed. After it has died it can be started again.
    """

    def __init__(self, config: ServerConfig) -> None:
        if not (config.repository / "ensemble/config.pbtxt").exists():
            raise ConfigError(
                f"'{config.repository}' is no furcate repository (no ensemble/config.pbtxt); write one with"
                " build_engine --repository."
            )
        check_host(config.host)
        self.config = config
        self.id = f"furcate-{uuid.uuid4().hex[:12]}"
        self.shm_prefix = self.id.replace("-", "")
        self.control_key = uuid.uuid4().hex
        self.ports = resolve_ports(config.http_port, config.grpc_port, config.metrics_port, host=config.host)
        self.log_file = config.log_file or Path(tempfile.gettempdir()) / f"{self.id}.log"
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{self.id}-"))
        self._drain_file = self._scratch / "draining"
        self._regions: SharedRegions | None = None
        self._process: ServerProcess | None = None
        self._num_loads = 0

    @property
    def grpc_url(self) -> str:
        """For `Client`."""
        return f"grpc://{self._reachable}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """For `Client`, curl and load tools."""
        return f"http://{HOST}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        """Prometheus text."""
        return f"http://{self._reachable}:{self.ports.metrics}/metrics"

    @property
    def _reachable(self) -> str:
        """Where this machine reaches what listens on the configured host."""
        return HOST if self.config.host == ALL_ADDRESSES else self.config.host

    @property
    def pid(self) -> int:
        """The running server's process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    @cached_property
    def _python_models(self) -> set[str]:
        return {path.parents[1].name for path in self.config.repository.glob("*/1/model.py")}

    @cached_property
    def _installation(self) -> Installation:
        return find_installation(self._scratch)

    def start(self) -> None:
        """Starts the server and returns when it is ready; ServerError says why it is not."""
        try:
            remove_stale_regions()
            check_room(len(self._python_models), self.config.region_bytes)
            self._regions = SharedRegions(self.shm_prefix)
            self.log_file.write_bytes(b"")
            self._launch(self._regions)
        except OSError as error:
            self.stop()
            raise ServerError(f"tritonserver cannot be started: {error}.") from None
        except BaseException:
            self.stop()
            raise

    def _launch(self, regions: SharedRegions) -> None:
        log_start = self.log_file.stat().st_size
        self._process = ServerProcess(
            server_command(self, self._installation),
            environment=self._environment(),
            log_file=self.log_file,
            inherited=regions.claim,
        )
        self._wait_until_ready(self._process, log_start)

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in KEEPING_MEMORY.items() if name not in os.environ}
        environment = {**own, **self._installation.environment, DRAIN_FILE: str(self._drain_file)}
        if self.config.json_log is not None:
            environment[JSON_LOG] = str(self.config.json_log.resolve())
        return environment

    def exit_code(self) -> int | None:
        """The exit code of the server's process; None while it runs."""
        assert self._process is not None, "not started"
        return self._process.exit_code()

    def is_running(self) -> bool:
        """False once the process has ended."""
        return self._process is not None and self._process.exit_code() is None

    def dead_models(self) -> list[str]:
        """The Python models of a running server whose processes have died: Triton goes on saying that it is ready."""
        assert self._process is not None, "not started"
        return sorted(self._python_models - self._process.models())

    def load_again(self, model_name: str) -> None:
        """Gives a model a new process; ServerError when it does not come up."""
        self._num_loads += 1
        load_again(
            self.http_url,
            key=self.control_key,
            model_dir=self.config.repository / model_name,
            generation=self._num_loads,
        )

    def start_again(self) -> None:
        """Ends what there is of the server at once and starts it on the same ports; ServerError when it does not come up."""
        assert self._process is not None and self._regions is not None, "not started"
        self._process.kill()
        self._regions.clear()
        try:
            self._launch(self._regions)
        except OSError as error:
            raise ServerError(f"tritonserver cannot be started: {error}.") from None

    def drain(self, timeout_s: float) -> bool:
        """Lets what is running finish, while new work is refused; False when `timeout_s` were not enough."""
        self._drain_file.touch()
        deadline = time.monotonic() + timeout_s
        while self.is_running() and not self.dead_models():
            if counter_sum(self.metrics_url, "furcate_live_requests") == 0:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(DRAIN_POLL_S)
        return False

    def stop(self) -> int | None:
        """Ends the server (see `drain`) and removes its leftovers; its exit code, if it ran."""
        code = self._process.end(timeout_s=4 * EXIT_TIMEOUT_S) if self._process is not None else None
        if self._regions is not None:
            self._regions.remove()
            self._regions = None
        shutil.rmtree(self._scratch, ignore_errors=True)
        return code

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self, process: ServerProcess, log_start: int) -> None:
        deadline = time.monotonic() + self.config.ready_timeout_s
        while time.monotonic() < deadline:
            if process.exit_code() is not None:
                reason = failure_in_log(self.log_file, since=log_start)
                raise ServerError(f"tritonserver ended before it was ready: {reason}")
            if self._answers_as_itself():
                return
            time.sleep(READY_POLL_S)
        raise ServerError(
            f"tritonserver was not ready after {self.config.ready_timeout_s:g} s; its log is {self.log_file}."
        )

    def _answers_as_itself(self) -> bool:
        """True when the port's server is ready and is ours: another one may share the port in silence."""
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=2):
                pass
            with urllib.request.urlopen(f"{self.http_url}/v2", timeout=2) as answer:
                return json.load(answer)["name"] == self.id
        except (OSError, ValueError):
            return False


def server_command(server: TritonServer, installation: Installation) -> list[str]:
    """The command line; HTTP listens on the loopback address only, the rest on the configured host."""
    ports: Ports = server.ports
    key = f"{RESTRICTED}:{CONTROL_HEADER}={server.control_key}"
    return [
        str(installation.binary),
        f"--id={server.id}",
        f"--model-repository={server.config.repository.resolve()}",
        "--model-control-mode=explicit",  # only so can a model be loaded again
        "--load-model=*",
        f"--http-restricted-api={key}",
        f"--grpc-restricted-protocol={key}",
        f"--backend-directory={installation.backend_directory}",
        f"--cache-directory={installation.cache_directory}",
        f"--http-address={HOST}",
        *(f"--{part}-address={server.config.host}" for part in ("grpc", "metrics")),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--backend-config=python,shm-region-prefix-name={server.shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={server.config.region_bytes}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        *_trace_options(server.config),
    ]


def _trace_options(config: ServerConfig) -> list[str]:
    """Triton's own tracing, sent to a collector; every model of a request's ensemble is a span."""
    if config.trace_url is None:
        return []
    settings = ("mode=opentelemetry", "level=TIMESTAMPS", f"rate={config.trace_rate}")
    of_mode = (f"url={config.trace_url}", "resource=service.name=furcate")
    return [
        *(f"--trace-config={setting}" for setting in settings),
        *(f"--trace-config=opentelemetry,{setting}" for setting in of_mode),
    ]
