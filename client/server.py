"""Starts the real tritonserver on a repository, and knows when it is ready."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from furcate.builder.errors import ConfigError, ServerError
from furcate.client import bound_exec
from furcate.client.installation import Installation, find_installation
from furcate.client.ports import ALL_ADDRESSES, HOST, Ports, check_host, resolve_ports

SHARED_MEMORY = Path("/dev/shm")
EXIT_TIMEOUT_S = 5
"""How long Triton waits at its end for what is still open; then it goes."""


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
    ready_timeout_s: float = 300.0
    """How long the models may take to load."""


class TritonServer:
    """A tritonserver process of our own; as a context manager it is stopped at the end.

    It dies with this process, and what it leaves in shared memory is removed.
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
        self.ports = resolve_ports(config.http_port, config.grpc_port, config.metrics_port, host=config.host)
        self.log_file = config.log_file or Path(tempfile.gettempdir()) / f"{self.id}.log"
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{self.id}-"))
        self._process: subprocess.Popen[bytes] | None = None

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

    def start(self) -> None:
        """Starts the server and returns when it is ready; ServerError says why it is not."""
        installation = find_installation(self._scratch)
        try:
            with self.log_file.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", bound_exec.__file__, str(os.getpid()), *server_command(self, installation)],
                    env={**os.environ, **installation.environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches us, and we end it in order
                )
        except OSError as error:
            self.stop()
            raise ServerError(f"tritonserver cannot be started: {error}.") from None
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """The exit code, once the server has ended."""
        assert self._process is not None, "not started"
        return self._process.wait()

    def is_running(self) -> bool:
        """False once the process has ended."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int | None:
        """Ends the server in order (in-flight work finishes), removes its leftovers; its exit code, if it ran."""
        code = None
        if self._process is not None:
            code = _end(self._process)
        for leftover in SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            leftover.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        return code

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.config.ready_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"tritonserver ended before it was ready: {failure_in_log(self.log_file)}")
            if self._answers_as_itself():
                return
            time.sleep(0.05)
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
    return [
        str(installation.binary),
        f"--id={server.id}",
        f"--model-repository={server.config.repository.resolve()}",
        f"--backend-directory={installation.backend_directory}",
        f"--cache-directory={installation.cache_directory}",
        f"--http-address={HOST}",
        *(f"--{part}-address={server.config.host}" for part in ("grpc", "metrics")),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--backend-config=python,shm-region-prefix-name={server.shm_prefix}",
        "--backend-config=python,shm-default-byte-size=16777216",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
    ]


def failure_in_log(log_file: Path) -> str:
    """One sentence from Triton's log on why it ended, with the log's path."""
    try:
        text = log_file.read_text(errors="replace")
    except OSError:
        return f"its log {log_file} cannot be read."
    reasons = re.findall(r"failed to load '\w+' version \d+: (?:\w+: )?(.+)", text) or re.findall(
        r"(?m)^error: (.+)", text
    )
    own = [match for reason in reasons for match in re.findall(r"(?:EngineMismatch|ConfigError): (.+)", reason)]
    # Triton logs a Python error with its traceback in one line, line ends as two characters.
    reason = (own or reasons or ["no reason was logged"])[0].split("\\n")[0].strip().rstrip(".")
    return f"{reason}. Its log is {log_file}."


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process asked to end, and made to end when it does not (or when a second Ctrl-C comes)."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=4 * EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
