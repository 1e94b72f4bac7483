"""What servers keep in /dev/shm: claimed while they live, swept away after them."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from furcate.builder.errors import ConfigError
from furcate.client.shared_memory import SHARED_MEMORY, SharedRegions, check_room, remove_stale_regions

HOLDER = """
import sys, time
from furcate.client.shared_memory import SharedRegions
regions = SharedRegions(sys.argv[1])
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = f"furcate{uuid.uuid4().hex[:12]}"
    yield prefix
    for leftover in SHARED_MEMORY.glob(f"*{prefix}*"):
        leftover.unlink()


def files(prefix: str) -> set[str]:
    return {path.name.removeprefix(prefix) for path in SHARED_MEMORY.glob(f"*{prefix}*")}


def test_regions_are_removed_with_their_claim(prefix: str) -> None:
    regions = SharedRegions(prefix)
    (SHARED_MEMORY / f"{prefix}abc").write_bytes(b"x")
    assert files(prefix) == {".lock", "abc"}
    remove_stale_regions()
    assert files(prefix) == {".lock", "abc"}
    regions.clear()
    assert files(prefix) == {".lock"}
    regions.remove()
    assert files(prefix) == set()


def test_what_a_killed_server_left_is_swept_away_once_all_its_processes_are_gone(prefix: str) -> None:
    (SHARED_MEMORY / f"{prefix}abc").write_bytes(b"x")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, prefix], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "claimed\n"
    remove_stale_regions()
    assert files(prefix) == {".lock", "abc"}
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert remove_stale_regions() >= 2
    assert files(prefix) == set()


def test_what_is_not_ours_is_left_alone() -> None:
    names = [f"furcate-{uuid.uuid4().hex[:12]}.lock", f"other{uuid.uuid4().hex[:12]}.lock"]
    paths = [SHARED_MEMORY / name for name in names]
    try:
        for path in paths:
            path.write_bytes(b"")
        remove_stale_regions()
        assert all(path.exists() for path in paths)
    finally:
        for path in paths:
            path.unlink()


def test_too_little_room_is_one_sentence() -> None:
    check_room(3, 1 << 20)
    with pytest.raises(
        ConfigError, match=r"/dev/shm has \d+ MiB free, but 3 models begin with \d+ MiB each; give it more"
    ):
        check_room(3, 1 << 50)
