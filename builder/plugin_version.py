"""The version of our plugins: what must be the same when a plan is built and when its kernels are replaced or commit runs."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.metadata import PackageNotFoundError, version

SOURCES = (
    "specification.py", "tree_attention/kernel.py", "tree_attention/launch.py", "tree_attention/tactics.py",
    "cache_commit/kernel.py", "cache_commit/launch.py",
)  # fmt: skip


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
