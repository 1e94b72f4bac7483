"""The commit kernel, interpreted, against its definition."""

import pytest
import torch

from furcate.plugins.cache_commit.reference import reference_commit


def problem(seed: int, dtype: torch.dtype, page_size: int):
    """Two layers, three sequences; the last is idle and names the first one's page. Two entries are garbage."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(2, 9, 2, page_size, 2, 24, generator=generator).to(dtype)
    order = torch.randperm(9, generator=generator).to(torch.int32)
    page_table = torch.stack([order[:4], order[4:8], order[:1].expand(4)]).contiguous()
    cache_lengths = torch.tensor([13, 0, 13], dtype=torch.int32)
    path_nodes = torch.tensor([[0, 2, 3, 4, 21], [0, 1, 9, -1, 9999], [0, 5, 6, 7, 8]], dtype=torch.int32)
    num_accepted = torch.tensor([5, 3, 0], dtype=torch.int32)
    return pool, page_table, cache_lengths, path_nodes, num_accepted


@pytest.mark.parametrize(
    ("dtype", "page_size"), [(torch.float32, 16), (torch.bfloat16, 32), (torch.float16, 64), (torch.int8, 128)]
)
@pytest.mark.parametrize("is_address", [False, True])
def test_commit_equals_its_definition(interpreter, dtype, page_size, is_address):
    """Rows 2, 3, 4 -> 1, 2, 3 overlap; int8 stands for float8, whose bits move as well."""
    pool, page_table, cache_lengths, path_nodes, num_accepted = problem(0, dtype, page_size)
    expected = reference_commit(pool, page_table, cache_lengths, path_nodes, num_accepted)
    path = path_nodes, num_accepted
    lengths, committed = interpreter(
        "commit", pool=pool, page_table=page_table, cache_lengths=cache_lengths, path=path, is_address=is_address
    )
    assert not torch.equal(expected, pool)
    assert torch.equal(committed, expected)
    assert lengths.tolist() == [18, 3, 13]
