"""What our servers keep in /dev/shm: claimed while a server or one of its model processes lives, removed afterwards.

Triton's Python backend names its regions with a prefix of our choice. Beside them lies PREFIX.lock, locked by the server and its
model processes (they inherit the open file), so that anyone can tell what a killed server left behind, in any container.
"""

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from furcate.builder.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_LOCK_FILE = re.compile(r"furcate[0-9a-f]{12}\.lock")


class SharedRegions:
    """The regions whose names begin with `prefix`, claimed until `remove`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        path = SHARED_MEMORY / f".{prefix}.claiming"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its own name only once it is locked: nobody finds it free in between.
        path.rename(SHARED_MEMORY / f"{prefix}.lock")

    @property
    def claim(self) -> int:
        """The open file that a process must inherit for the regions to count as in use while it lives."""
        return self._lock

    def clear(self) -> None:
        """Removes the regions; the claim stays."""
        _unlink(self.prefix, keeps_lock=True)

    def remove(self) -> None:
        """Removes the regions and the claim."""
        _unlink(self.prefix, keeps_lock=False)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def check_room(num_regions: int, region_bytes: int) -> None:
    """ConfigError when /dev/shm cannot hold the regions that so many models begin with."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if num_regions * region_bytes > free:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, but {num_regions} models begin with {region_bytes >> 20} MiB each;"
            " give it more (docker run --shm-size), or lower --region-mb."
        )


def remove_stale_regions() -> int:
    """How many files of servers that are gone were found and removed."""
    num_removed = 0
    for path in SHARED_MEMORY.glob("furcate*.lock"):
        if _LOCK_FILE.fullmatch(path.name) and not _is_locked(path):
            num_removed += _unlink(path.stem, keeps_lock=False)
    return num_removed


def _is_locked(path: Path) -> bool:
    """True while somebody holds the lock; also when that cannot be told (another user's file)."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _unlink(prefix: str, *, keeps_lock: bool) -> int:
    """The number of files removed; the lock file goes last, so that an interrupted removal is found again."""
    lock_file = SHARED_MEMORY / f"{prefix}.lock"
    leftovers = [path for path in SHARED_MEMORY.glob(f"{prefix}*") if path != lock_file]
    if not keeps_lock:
        leftovers.append(lock_file)
    for path in leftovers:
        with contextlib.suppress(OSError):  # another server of ours was quicker
            path.unlink()
    return len(leftovers)
