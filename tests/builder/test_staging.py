"""What killed builds leave behind is swept away by the next one; what a running build writes is not."""

import os
import subprocess
import sys

import pytest

from furcate.builder.staging import staged, sweep

FOREVER = """
import sys, time
from pathlib import Path
from furcate.builder.staging import staged

with staged(Path(sys.argv[1])) as directory:
    (directory / "half").write_text("half")
    print(directory, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def running(tmp_path):
    """A process that is in the middle of writing tmp_path/engine, and the directory it writes to."""
    with subprocess.Popen(
        [sys.executable, "-c", FOREVER, str(tmp_path / "engine")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def names(directory) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_killed_build_is_swept_away_by_the_next_and_a_running_one_is_not(running, tmp_path):
    process, partial = running
    with staged(tmp_path / "engine") as directory:
        (directory / "whole").write_text("whole")
        assert os.path.basename(partial) in names(tmp_path), "another build is writing there"
    assert names(tmp_path) == {"engine", os.path.basename(partial)}
    process.kill()
    process.wait()
    with staged(tmp_path / "engine") as directory:
        (directory / "newer").write_text("newer")
    assert names(tmp_path) == {"engine"}
    assert names(tmp_path / "engine") == {"newer"}


def test_a_leftover_of_a_process_with_our_own_number_is_no_obstacle(tmp_path):
    """In a container every build may be process 7."""
    leftover = tmp_path / f".engine.partial-{os.getpid()}"
    leftover.mkdir()
    (leftover / "half").write_text("half")
    with staged(tmp_path / "engine") as directory:
        assert names(directory) == set()
    assert names(tmp_path) == {"engine"}


def test_an_output_that_was_put_aside_and_not_replaced_comes_back(tmp_path):
    retired = tmp_path / f".engine.retired-{dead_pid()}"
    retired.mkdir()
    (retired / "old").write_text("old")
    with pytest.raises(RuntimeError, match="no more"), staged(tmp_path / "engine"):
        raise RuntimeError("no more")
    assert names(tmp_path) == {"engine"}
    assert names(tmp_path / "engine") == {"old"}


def test_only_siblings_of_this_output_are_touched(tmp_path):
    pid = dead_pid()
    others = {
        f".engine2.partial-{pid}",
        ".engine.partial-",
        ".engine.partial-7x",
        "engine.partial-7",
        f".engine.kept-{pid}",
    }
    for name in (*others, f".engine.probe-{pid}", f".engine.partial-{pid}"):
        (tmp_path / name).mkdir()
    sweep(tmp_path / "engine")
    assert names(tmp_path) == others
