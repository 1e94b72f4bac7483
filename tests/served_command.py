"""A running `furcate serve`, as its user sees it; shared by the tests of the command and of supervision."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

FURCATE = [sys.executable, "-m", "furcate.client.cli"]
AUTO = ["--http-port", "auto", "--grpc-port", "auto", "--metrics-port", "auto"]
PATIENCE_S = 90.0
"""For what takes seconds when the machine is free."""


class Served:
    """A `furcate serve` process whose output grows in `output`; made once it has said how to try it (or ended)."""

    def __init__(self, repository: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        """`prefix` begins a command that becomes this one."""
        self.process = subprocess.Popen(
            [*prefix, *FURCATE, "serve", str(repository), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for("furcate generate")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, *texts: str, after: int = 0) -> None:
        """Returns when one of the texts has been said, behind so many characters of output."""

        def is_said() -> bool:
            return any(text in self.output[after:] for text in texts)

        wait_until(lambda: is_said() or self.process.poll() is not None, f"'{texts}'")
        assert is_said(), self.output

    def address(self, name: str) -> str:
        found = re.search(rf"{name} +(\S+)", self.output)
        assert found is not None, self.output
        return found.group(1)

    def server_pid(self) -> int:
        """The tritonserver's process."""
        (pid,) = (
            pid for pid, line in processes() if line[0].endswith("tritonserver") and parent(pid) == self.process.pid
        )
        return pid

    def stub_pid(self, model_name: str) -> int:
        """The process that runs a Python model of this server."""
        (pid,) = (
            pid
            for pid, line in processes()
            if parent(pid) == self.server_pid() and any(item.endswith(f"/{model_name}/1/model.py") for item in line)
        )
        return pid

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code after this signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """The exit code, once it has ended."""
        code = self.process.wait(timeout=PATIENCE_S)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def processes() -> list[tuple[int, list[str]]]:
    """Every process and its command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            line = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if line[0]:
                found.append((int(process.name), line))
    return found


def parent(pid: int) -> int:
    """The parent of a process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def is_alive(pid: int) -> bool:
    """False for a process that is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns when the condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.05)
