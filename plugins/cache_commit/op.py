"""`furcate::cache_commit` as a torch operator: plain indexing on the CPU, one kernel for all layers on a GPU.

B batch, A path entries, P pages of a sequence.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import torch

from furcate.builder.errors import ConfigError
from furcate.plugins.cache_commit.cpu import commit_paths

if TYPE_CHECKING:
    from jaxtyping import Int32, Shaped
    from torch import Tensor

SCHEMA = "(Tensor(a!) pool, Tensor page_table, Tensor cache_lengths, Tensor path_nodes, Tensor num_accepted) -> Tensor"


def cache_commit(
    pool: Shaped[Tensor, "layers pages 2 page_size Hkv D"],
    page_table: Int32[Tensor, "B P"],
    cache_lengths: Int32[Tensor, " B"],
    path_nodes: Int32[Tensor, "B A"],
    num_accepted: Int32[Tensor, " B"],
) -> Int32[Tensor, " B"]:
    """The committed lengths; in every layer the accepted nodes' K/V is moved to the sequence's end, in place."""
    return torch.ops.furcate.cache_commit(pool, page_table, cache_lengths, path_nodes, num_accepted)


def _on_cpu(pool, page_table, cache_lengths, path_nodes, num_accepted) -> Tensor:
    commit_paths(pool, page_table, cache_lengths, path_nodes, num_accepted)
    return cache_lengths + num_accepted


def _on_cuda(pool, page_table, cache_lengths, path_nodes, num_accepted) -> Tensor:
    path = path_nodes, num_accepted
    return _launch_module().launch_cache_commit(pool, page_table, cache_lengths, path)


@functools.cache
def _launch_module():
    """launch.py, imported at the first call on a GPU: the kernel language is not needed elsewhere."""
    try:
        return importlib.import_module("furcate.plugins.cache_commit.launch")
    except ModuleNotFoundError as error:
        raise ConfigError(f"Running on a GPU needs {error.name}: pip install 'furcate[gpu]'.") from error


_operator = torch.library.custom_op(
    "furcate::cache_commit", _on_cpu, mutates_args=("pool",), device_types="cpu", schema=SCHEMA
)
_operator.register_kernel("cuda", _on_cuda)


@_operator.register_fake
def _shape(pool, page_table, cache_lengths, path_nodes, num_accepted):
    return torch.empty_like(cache_lengths)
