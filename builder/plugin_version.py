"""The version of our plugins: what must be the same when a plan is built and when its kernels are replaced or commit runs."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.metadata import PackageNotFoundError, version

SOURCES = (
    "specification.py",
    *(
        f"tree_attention/{name}.py"
        for name in ("ancestors", "kernel", "launch", "nodes", "pages", "rows", "softmax", "tactics")
    ),
    "cache_commit/kernel.py",
    "cache_commit/launch.py",
)


def plugin_version() -> str:
    """Hex digest of the kernels' sources and interface, and of the compiler's version; 16 digits."""
    digest = hashlib.sha256()
    folder = resources.files("furcate.plugins")
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    try:
        digest.update(version("triton").encode())
    except PackageNotFoundError:
        digest.update(b"no triton")
    return digest.hexdigest()[:16]
