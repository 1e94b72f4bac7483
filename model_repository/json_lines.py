"""Structured logs: one line of JSON for each event. Counts, times and names only: never a prompt or a text."""

import json
import os
import time
from pathlib import Path


class JsonLines:
    """A log that several processes may add to: each line is one write at the file's end. Without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def write(self, event: str, **fields: object) -> None:
        """Adds {"time_ns": ..., "event": event, ...}."""
        if self._file is not None:
            line = json.dumps({"time_ns": time.time_ns(), "event": event, **fields}, ensure_ascii=True)
            os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Ends the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
