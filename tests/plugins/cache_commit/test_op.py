"""The torch operator of the commit."""

import torch

from furcate.plugins.cache_commit import op
from furcate.plugins.cache_commit.reference import reference_commit


def arguments():
    generator = torch.Generator().manual_seed(4)
    pool = torch.randn(2, 6, 2, 16, 2, 8, generator=generator)
    page_table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    path_nodes = torch.tensor([[0, 3, 7], [0, 1, 5]], dtype=torch.int32)
    accepted = torch.tensor([3, 1], dtype=torch.int32)
    return pool, page_table, torch.tensor([14, 20], dtype=torch.int32), path_nodes, accepted


def test_operator_equals_the_definition_and_counts():
    pool, *rest = arguments()
    expected = reference_commit(pool, *rest)
    assert op.cache_commit(pool, *rest).tolist() == [17, 21]
    assert torch.equal(pool, expected)


def test_torch_finds_the_operator_well_formed():
    checks = ("test_schema", "test_faketensor")
    result = torch.library.opcheck(torch.ops.furcate.cache_commit.default, arguments(), test_utils=checks)
    assert result == dict.fromkeys(checks, "SUCCESS")
