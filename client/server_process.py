"""The tritonserver process and those of its Python models: started together, ended together."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from furcate.client import bound_exec

STUB_NAME = "triton_python_backend_stub"


class ServerProcess:
    """A running tritonserver. It dies with this process (with the thread that made it), and its models die with it."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log_file: Path, inherited: int
    ) -> None:
        """Starts it; its output is added to `log_file`, and it inherits the open file `inherited`. Raises OSError."""
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", bound_exec.__file__, str(os.getpid()), *command],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(inherited,),
                start_new_session=True,  # Ctrl-C reaches us, and we end it in order; its group holds its models too
            )

    @property
    def pid(self) -> int:
        """The server's process id, and its group's."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code, once it has ended; subprocess.TimeoutExpired."""
        return self._process.wait(timeout_s)

    def models(self) -> set[str]:
        """The names of the Python models whose processes live."""
        return {model for pid in _children(self.pid) if (model := _model_run_by(pid)) is not None}

    def end(self, *, timeout_s: float) -> int:
        """The exit code, after asking it to end in order; made to end when it does not (or when we are interrupted)."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=timeout_s)
        finally:
            code = self.kill()
        return code

    def kill(self) -> int:
        """Ends it and its models at once; its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait()
        # A killed server leaves its models' processes behind; they are still of its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return code


def _children(pid: int) -> list[int]:
    """Living child processes (those that ended and were not waited for are left out)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = status.read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == pid and state not in "ZX":
                found.append(int(status.parent.name))
    return found


def _model_run_by(pid: int) -> str | None:
    """The model of a Python backend's process: .../triton_python_backend_stub REPOSITORY/MODEL/VERSION/model.py ..."""
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if arguments[0].endswith(STUB_NAME):
            return next((Path(item).parents[1].name for item in arguments if item.endswith("/model.py")), None)
    return None
