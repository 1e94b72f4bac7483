"""Outputs that appear whole or not at all: written to a hidden sibling, then renamed.

A build that is killed leaves its sibling behind; the next build of the same output sweeps it away.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from furcate.builder.errors import BuildError, ConfigError


def check_output(path: Path, *, may_replace: bool) -> None:
    """Nothing; raises ConfigError when `path` is taken, or cannot be created where it is."""
    if path.exists() and not may_replace:
        raise ConfigError(f"{path} exists already; choose another path, or add --overwrite to replace it.")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file, not a directory; choose another path.")
    parent = path.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        probe = parent / f".{path.name}.probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error} ({error.filename}); choose a writable place."
        ) from error


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A directory to fill in place of `path`; it becomes `path` when the with-block ends well, and vanishes when not.

    An old directory at `path` is replaced only then. Raises BuildError when the disk refuses.
    """
    path = path.absolute()
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    retired = path.parent / f".{path.name}.retired-{os.getpid()}"
    lock = None
    try:
        sweep(path)
        partial.mkdir()
        lock = _locked(partial)
        yield partial
        if path.exists():
            path.rename(retired)
        partial.rename(path)
    except (OSError, SafetensorError) as error:
        if retired.exists() and not path.exists():
            retired.rename(path)
        raise BuildError(f"{path} could not be written: {_reason(error)}; nothing was changed there.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(path: Path) -> None:
    """Removes what builds of `path` that were killed left beside it, and never what a running one is writing.

    An old output that a killed build had put aside and not yet replaced is put back.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(partial|retired|probe)-(\d+)")
    for sibling in sorted(path.parent.iterdir(), key=lambda entry: entry.name):
        match = pattern.fullmatch(sibling.name)
        if match is None or _is_in_use(sibling, int(match[2])):
            continue
        if match[1] == "retired" and not path.exists():
            sibling.rename(path)
        else:
            shutil.rmtree(sibling, ignore_errors=True)


def _is_in_use(sibling: Path, pid: int) -> bool:
    """Whether another process still works in a sibling: it is alive, or (in another container) holds the lock."""
    if pid != os.getpid():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            pass
        except OSError:
            return True
        else:
            return True
    lock = _locked(sibling)
    if lock is not None:
        os.close(lock)
    return lock is None


def _locked(directory: Path) -> int | None:
    """A file descriptor that holds the directory's lock, until it is closed or its process dies; None if another has it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _reason(error: OSError | SafetensorError) -> str:
    """What the system said: "No space left on device". Rust libraries wrap it in words of their own."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return re.sub(r"^.*I/O error: | \(os error \d+\)$", "", said)
