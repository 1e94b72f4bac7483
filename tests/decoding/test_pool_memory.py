"""A server takes the memory of its K/V pools at its start, or says that there is not enough."""

import ctypes
import os
import re

import pytest
import torch

from furcate.builder.engine import read_engine
from furcate.builder.errors import EngineMismatch
from furcate.decoding.executors.pool_memory import available_bytes, check_fits, take_pool_memory
from furcate.decoding.executors.torch import TorchExecutor

POOL_BYTES = 64 * 2**20


def resident_share(pool: torch.Tensor) -> float:
    """The share of a tensor's pages that lie in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, end = -(-pool.data_ptr() // page), (pool.data_ptr() + pool.nbytes) // page
    found = (ctypes.c_ubyte * (end - start))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start * page), ctypes.c_size_t((end - start) * page), found) == 0
    return sum(entry & 1 for entry in found) / len(found)


@pytest.fixture
def executor(tiny_engine) -> TorchExecutor:
    engine = read_engine(tiny_engine("eagle3"))
    num_tokens = POOL_BYTES // engine.manifest.kv_bytes_per_token()
    return TorchExecutor(read_engine(tiny_engine("eagle3", max_pool_tokens=num_tokens)))


def test_pools_lie_in_memory_before_the_first_request(executor):
    take_pool_memory(executor.target_pool, executor.head_pool)
    assert resident_share(executor.target_pool) == resident_share(executor.head_pool) == 1


def test_a_pool_that_is_too_large_for_the_machine_is_refused_in_one_sentence(executor):
    wanted = executor.target_pool.nbytes
    check_fits([executor.target_pool], wanted)
    with pytest.raises(EngineMismatch, match=re.escape("GiB of memory, and this machine has")) as caught:
        check_fits([executor.target_pool], wanted - 1)
    assert "--max-pool-tokens" in str(caught.value) and "\n" not in str(caught.value)


def test_a_pool_that_no_machine_has_is_refused_in_one_sentence(tiny_engine):
    engine = read_engine(tiny_engine("eagle3", max_pool_tokens=10**12))
    with pytest.raises(EngineMismatch, match="more than this machine gives; free some, or build"):
        TorchExecutor(engine)


def test_a_head_without_a_cache_needs_none():
    before = available_bytes()
    take_pool_memory(None)
    assert before > 0
