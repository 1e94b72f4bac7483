"""Finds a tritonserver on this machine: NVIDIA's container, or the `nvidia-pytriton` wheel."""

import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from furcate.builder.errors import ConfigError

CONTAINER_ROOT = Path("/opt/tritonserver")


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A tritonserver and what it needs around it."""

    binary: Path
    backend_directory: Path
    cache_directory: Path
    environment: dict[str, str] = field(default_factory=dict)


def find_installation(scratch: Path) -> Installation:
    """The tritonserver to run; ConfigError when there is none.

    The wheel keeps the backend's parts in several places, so its backend directory is made of links in `scratch`.
    """
    if (CONTAINER_ROOT / "bin/tritonserver").exists():
        return Installation(
            binary=CONTAINER_ROOT / "bin/tritonserver",
            backend_directory=CONTAINER_ROOT / "backends",
            cache_directory=CONTAINER_ROOT / "caches",
        )
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"No tritonserver here: neither {CONTAINER_ROOT} nor the nvidia-pytriton wheel is installed; run"
            " pip install 'furcate[server]', or serve inside NVIDIA's Triton container."
        )
    return _wheel_installation(Path(spec.origin).parent, scratch)


def _wheel_installation(package: Path, scratch: Path) -> Installation:
    root = package / "tritonserver"
    stubs = root / "python_backend_stubs"
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = stubs / python_version / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in stubs.iterdir()))
        raise ConfigError(
            f"The nvidia-pytriton wheel has no Python backend for Python {python_version}; it has {known}."
        )
    backend = scratch / "backends/python"
    backend.mkdir(parents=True)
    for source in (
        root / "backends/python/libtriton_python.so",
        root / "backends/python/triton_python_backend_utils.py",
        stub,
    ):
        (backend / source.name).symlink_to(source)
    return Installation(
        binary=root / "bin/tritonserver",
        backend_directory=backend.parent,
        cache_directory=root / "caches",
        environment=_wheel_environment(package.parent / "nvidia_pytriton.libs"),
    )


def _wheel_environment(wheel_libraries: Path) -> dict[str, str]:
    """Where the server finds libpython and its own libraries, and its stubs (through `python3`) this environment."""
    python_libraries = str(sysconfig.get_config_var("LIBDIR"))
    libraries = [python_libraries, str(wheel_libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}",
    }
