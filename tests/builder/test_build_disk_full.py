"""A disk that fills up while an engine or its repository is written: one sentence, and nothing left behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A mount of its own, seen by this process alone: the disk really is full.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=$1k tmpfs "$2"; disk="$2"; shift 2
"$@"; code=$?
echo "left: $(ls -A "$disk")"
exit $code
"""


def has_own_mounts() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not has_own_mounts(), reason="needs a mount namespace of its own (unshare)")


def build(size_kib: int, disk: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    disk.mkdir()
    shell = ("sh", "-c", ON_A_SMALL_DISK, "sh", size_kib, disk)
    command = (*shell, Path(sys.executable).parent / "build_engine", "--dtype", "float32", *options)
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", *map(str, command)], capture_output=True, text=True
    )


# The weights are 879 KiB; the tokenizer and the manifest follow.
@pytest.mark.parametrize("size_kib", [300, 884, 888, 892, 900])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(size_kib: int, tiny_target: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    result = build(size_kib, disk, "--target", tiny_target, "--output", disk / "engine")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "could not be written: No space left on device" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout.splitlines()[-1] == "left: "


def test_a_full_disk_under_the_repository_leaves_no_half_of_it(tiny_target: Path, tmp_path: Path) -> None:
    disk, engine = tmp_path / "disk", tmp_path / "engine"
    result = build(8, disk, "--target", tiny_target, "--output", engine, "--repository", disk / "repository")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "No space left on device" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout.splitlines()[-1] == "left: "
