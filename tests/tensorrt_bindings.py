"""Parts of TensorRT on a machine without it, from public wheels: its Python bindings over a stub of the library, its headers."""

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
HEADERS = ("kernel-lens==2.0.1", "kernel_lens/include/tensorrt")
"""A wheel that carries the public headers of TensorRT 10.14, and their folder in it; none of TensorRT's own does."""


def unpacked_wheel(requirement: str) -> Path:
    """Folder of a wheel's files, downloaded once; what it depends on is not needed here."""
    name, version = requirement.split("==")
    folder = CACHE / f"{name}-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), requirement]
        result = subprocess.run(command, capture_output=True, text=True)
        wheels = list(CACHE.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        if result.returncode or not wheels:
            pytest.skip(f"{requirement} cannot be downloaded: {result.stderr.strip()[-200:]}")
        partial = CACHE / f"{name}-{version}.{os.getpid()}"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(partial)
        if not folder.exists():
            partial.rename(folder)
    return folder


def unpacked_bindings(version: str) -> Path:
    """Folder of TensorRT's Python bindings of that version."""
    return unpacked_wheel(f"tensorrt-cu13-bindings=={version}")


def tensorrt_headers() -> Path:
    """Folder of NvInferRuntime.h: FURCATE_TENSORRT_INCLUDE, that of an installed TensorRT, or a wheel's."""
    for folder in (os.environ.get("FURCATE_TENSORRT_INCLUDE"), "/usr/include/x86_64-linux-gnu", "/usr/include"):
        if folder and (Path(folder) / "NvInferRuntime.h").exists():
            return Path(folder)
    requirement, within = HEADERS
    return unpacked_wheel(requirement) / within


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
