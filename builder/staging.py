"""Outputs that appear whole or not at all: written to a hidden sibling, then renamed."""

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
    try:
        partial.mkdir()
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


def _reason(error: OSError | SafetensorError) -> str:
    """What the system said: "No space left on device". Rust libraries wrap it in words of their own."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return re.sub(r"^.*I/O error: | \(os error \d+\)$", "", said)
