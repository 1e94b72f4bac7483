"""The commit of accepted paths on the CPU against its definition."""

import pytest
import torch

from furcate.plugins.cache_commit.cpu import commit_paths
from furcate.plugins.cache_commit.reference import reference_commit


def problem(seed: int, page_size: int = 16):
    """Pool of three layers, three sequences; the last one is idle and its page_table names the first one's page."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(3, 9, 2, page_size, 2, 8, generator=generator)
    order = torch.randperm(9, generator=generator).to(torch.int32)
    page_table = torch.stack([order[:4], order[4:8], order[:1].expand(4)])
    cache_lengths = torch.tensor([13, 0, 13], dtype=torch.int32)
    path_nodes = torch.tensor([[0, 2, 3, 7, 21], [0, 1, 9, -1, 99], [0, 5, 6, 7, 8]], dtype=torch.int32)
    num_accepted = torch.tensor([5, 3, 0], dtype=torch.int32)
    return pool, page_table, cache_lengths, path_nodes, num_accepted


@pytest.mark.parametrize("seed", [0, 1])
def test_commit_equals_its_definition(seed):
    pool, *rest = problem(seed)
    expected = reference_commit(pool, *rest)
    assert not torch.equal(expected, pool)
    commit_paths(pool, *rest)
    torch.testing.assert_close(pool, expected, atol=0, rtol=0)


def test_overlapping_moves_read_before_they_write():
    pool, page_table, cache_lengths, _, _ = problem(2)
    path_nodes = torch.tensor([[0, 2, 3, 4, 5]] * 3, dtype=torch.int32)
    num_accepted = torch.tensor([5, 5, 0], dtype=torch.int32)
    before = pool.clone()
    commit_paths(pool, page_table, cache_lengths, path_nodes, num_accepted)
    for i in range(1, 5):
        (source_page, source), (page, row) = divmod(13 + i + 1, 16), divmod(13 + i, 16)
        assert torch.equal(pool[:, page_table[0, page], :, row], before[:, page_table[0, source_page], :, source])


def test_a_path_that_lies_in_place_moves_nothing():
    pool, page_table, cache_lengths, _, _ = problem(3)
    before = pool.clone()
    chain = torch.arange(5, dtype=torch.int32).expand(3, 5)
    commit_paths(pool, page_table, cache_lengths, chain, torch.tensor([5, 2, 1], dtype=torch.int32))
    assert torch.equal(pool, before)
