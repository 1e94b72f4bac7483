"""A server takes the memory of its K/V pools at its start, or says that there is not enough."""

import re
from pathlib import Path

import pytest

from furcate.builder.engine import read_engine
from furcate.builder.errors import EngineMismatch
from furcate.decoding.executors.pool_memory import available_bytes, check_fits, take_pool_memory
from furcate.decoding.executors.torch import TorchExecutor

POOL_BYTES = 64 * 2**20


def resident_bytes() -> int:
    """What this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


@pytest.fixture
def executor(tiny_engine) -> TorchExecutor:
    engine = read_engine(tiny_engine("eagle3"))
    num_tokens = POOL_BYTES // engine.manifest.kv_bytes_per_token()
    return TorchExecutor(read_engine(tiny_engine("eagle3", max_pool_tokens=num_tokens)))


def test_pools_lie_in_memory_before_the_first_request(executor):
    before = resident_bytes()
    take_pool_memory(executor.target_pool, executor.head_pool)
    assert resident_bytes() - before > 0.9 * POOL_BYTES


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
