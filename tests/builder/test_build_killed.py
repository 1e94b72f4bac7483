"""A build that is killed at any moment leaves no directory that loads: the output is whole, the old one, or not there.

One process forks a build per delay, so that only the build itself is repeated; kill -9 leaves no chance to clean up.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import MANIFEST_FILE, read_engine
from furcate.builder.errors import EngineMismatch

NUM_BUILDS = 24
# Times one whole build elsewhere, then forks builds and kills each at a moment between its start and a little behind its
# end; prints whether it was still running, and waits for a line before the next.
LOOP = """
import os, random, signal, sys, time
from pathlib import Path
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType

def build(output, name):
    child = os.fork()
    if child == 0:
        try:
            build_engine(BuildConfig(
                target=Path(sys.argv[1]), output=Path(output), dtype=DataType.FLOAT32, overwrite=True, name=name
            ))
        finally:
            os._exit(0)
    return child

start = time.monotonic()
os.waitpid(build(sys.argv[3], "timed"), 0)
whole = time.monotonic() - start
generator = random.Random(1)
for index in range(int(sys.argv[4])):
    child = build(sys.argv[2], f"build{index}")
    time.sleep(generator.uniform(0, 1.3 * whole))
    os.kill(child, signal.SIGKILL)
    print(os.WIFSIGNALED(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.readline()
"""


def killed_builds(target: Path, output: Path, elsewhere: Path) -> Iterator[bool]:
    """Yields after each kill: whether the build had still been running."""
    command = [sys.executable, "-c", LOOP, str(target), str(output), str(elsewhere), str(NUM_BUILDS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(NUM_BUILDS):
            yield process.stdout.readline().strip() == "True"
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0


def test_a_killed_build_leaves_the_old_engine_the_new_one_or_none(tiny_target, tmp_path):
    parent = tmp_path / "engines"
    output = parent / "engine"
    parent.mkdir()
    num_killed = num_whole = 0
    for index, was_running in enumerate(killed_builds(tiny_target, output, tmp_path / "timed")):
        num_killed += was_running
        for directory in parent.iterdir():
            is_hidden_sibling = directory.name.startswith((".engine.partial-", ".engine.retired-", ".engine.probe-"))
            assert directory == output or is_hidden_sibling
            if not (directory / MANIFEST_FILE).exists():
                with pytest.raises(EngineMismatch):
                    read_engine(directory)
        if output.exists():
            assert int(read_engine(output).manifest.name.removeprefix("build")) <= index
            num_whole += 1
    assert num_killed > NUM_BUILDS // 4, "too few builds were interrupted to prove anything"
    assert num_whole > 0, "no build came to its end"
    build_engine(BuildConfig(target=tiny_target, output=output, dtype=DataType.FLOAT32, overwrite=True))
    assert [entry.name for entry in parent.iterdir()] == ["engine"], "the next build sweeps away what was left"
