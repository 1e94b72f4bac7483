"""Keeps a server serving: a dead model gets a new process, a server that died or hangs is started again.

Triton itself says that it is ready whatever becomes of its models' processes. So they are looked for in the process table, and a
canary generation goes through all models now and then. One that gets no answer means a hung server only if nothing else gets on
either: under load it waits in line like any request.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from furcate.builder.errors import ConfigError, FurcateError, ServerError
from furcate.client.canary import canary
from furcate.client.server import TritonServer
from furcate.client.server_control import counter_sum

POLL_S = 0.25
"""How often the processes are looked at."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two attempts to start a server again; doubled until a canary is answered."""
PROGRESS = "furcate_tokens_total"

Report = Callable[..., None]
"""Told of every event: report(event, sentence, **facts)."""


@dataclass(frozen=True, kw_only=True)
class SupervisionConfig:
    """How closely a server is watched."""

    canary_interval_s: float = 30.0
    """Between two canary generations."""
    canary_deadline_s: float = 60.0
    """A canary without an answer for so long, while nothing else gets on, means a hung server."""
    most_restarts: int = 5
    """Attempts in a row before the supervisor gives up."""

    def __post_init__(self) -> None:
        for name in ("canary_interval_s", "canary_deadline_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be above 0 seconds.")
        if self.most_restarts < 0:
            raise ConfigError(f"--most-restarts is {self.most_restarts}; it must be at least 0.")


class Supervisor:
    """Watches one started server, on the thread that started it: the server dies with that thread."""

    def __init__(self, server: TritonServer, config: SupervisionConfig, report: Report) -> None:
        self._server = server
        self._config = config
        self._report = report
        self._canary: _Canary | None = None
        self._next_canary_s = time.monotonic() + config.canary_interval_s
        self._num_restarts = 0
        """In a row, without an answered canary between them."""

    def run(self) -> None:
        """Does not return; ServerError when the server cannot be kept going."""
        while True:
            time.sleep(POLL_S)
            self.look()

    def look(self) -> None:
        """Looks once, and mends what it finds broken."""
        code = self._server.exit_code()
        if code is not None:
            self._start_again(f"tritonserver ended by itself (exit code {code})")
            return
        for name in self._server.dead_models():
            self._load_again(name)
        if self._canary is not None:
            self._judge(self._canary)
        elif time.monotonic() >= self._next_canary_s:
            self._canary = _Canary(self._server, self._config.canary_deadline_s)

    def _judge(self, run: "_Canary") -> None:
        if run.is_alive():
            return
        self._canary = None
        self._next_canary_s = time.monotonic() + self._config.canary_interval_s
        if run.error is None:
            self._num_restarts = 0
        elif self._server.exit_code() is not None or self._server.dead_models():
            self._next_canary_s = 0.0  # known by now why; asked again once that is mended
        elif run.has_progressed():
            self._report("canary_waits", f"The canary is not answered, but others are: {run.error}")
        else:
            self._start_again(f"the server hangs ({run.error})")

    def _load_again(self, name: str) -> None:
        start = time.monotonic()
        self._report("model_died", f"The process of {name} has died; loading it again ...", model=name)
        try:
            self._server.load_again(name)
        except ServerError as error:
            self._start_again(f"{name} is dead and stays dead ({error})")
            return
        seconds = time.monotonic() - start
        self._report("model_loaded", f"Loaded {name} again in {seconds:.1f} s.", model=name, seconds=seconds)
        self._canary = None  # one that was under way says nothing of what is there now
        self._next_canary_s = 0.0

    def _start_again(self, reason: str) -> None:
        self._canary = None
        while True:
            self._num_restarts += 1
            if self._num_restarts > self._config.most_restarts:
                raise ServerError(
                    f"{reason}, and {self._config.most_restarts} restarts in a row did not help; its log is"
                    f" {self._server.log_file}."
                )
            pause_s = min(FIRST_PAUSE_S * 2 ** (self._num_restarts - 1), LONGEST_PAUSE_S)
            self._report(
                "restarting", f"Starting again in {pause_s:g} s: {reason}.", reason=reason, attempt=self._num_restarts
            )
            time.sleep(pause_s)
            try:
                self._server.start_again()
            except ServerError as error:
                reason = str(error).rstrip(".")
                continue
            self._report("restarted", "The server is up again.", attempt=self._num_restarts)
            self._next_canary_s = 0.0
            return


class _Canary(threading.Thread):
    """A canary generation under way; afterwards `error` is None or says why it failed."""

    def __init__(self, server: TritonServer, deadline_s: float) -> None:
        super().__init__(name="furcate-canary", daemon=True)
        self._server = server
        self._deadline_s = deadline_s
        self._tokens_before = counter_sum(server.metrics_url, PROGRESS)
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        """Generates; on a thread of its own, so that deaths are noticed meanwhile."""
        try:
            canary(self._server.grpc_url, deadline_s=self._deadline_s)
        except FurcateError as error:
            self.error = str(error)

    def has_progressed(self) -> bool:
        """True when the server has computed something since the canary began."""
        tokens = counter_sum(self._server.metrics_url, PROGRESS)
        return tokens is not None and tokens > (self._tokens_before or 0.0)
