"""The commit kernel as an ahead-of-time source."""

from __future__ import annotations

from furcate.plugins.aot import KernelSource
from furcate.plugins.cache_commit.kernel import cache_commit
from furcate.plugins.cache_commit.launch import NUM_WARPS, commit_constants
from furcate.plugins.specification import CACHE_COMMIT


def commit_source(row_width: int, page_size: int, num_entries: int, element_bytes: int) -> KernelSource:
    """The commit of up to `num_entries` accepted nodes; a row holds `row_width` = Hkv * D elements."""
    constants = commit_constants(row_width, page_size, num_entries, element_bytes)
    signature = CACHE_COMMIT.signature("bf16")
    return KernelSource(kernel=cache_commit, signature=signature, constants=constants, num_warps=NUM_WARPS)
