"""The CPU path against the float64 definition: results, what is stored where, and that NaN rows are never seen."""

import pytest
import torch

from furcate.builder.errors import ConfigError
from furcate.plugins.tree_attention.cases import Case, CaseShape, TreeKind, make_case
from furcate.plugins.tree_attention.cpu import plan_attention, tree_attention
from furcate.plugins.tree_attention.spec import AttentionSpec, RopeTable, TreeBatch

# float32 sums of some hundred products of order 1 are off by some 1e-6; bf16 rounds q, k, the weights and the result
# to 8 bits (relative 4e-3), fp16 to 11 bits.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}

SHAPES = {
    "random": CaseShape(),
    "chain kind": CaseShape(kind=TreeKind.CHAIN, nodes=13),
    "star": CaseShape(kind=TreeKind.STAR, nodes=9),
    "single node": CaseShape(nodes=1),
    "65 nodes, three words": CaseShape(nodes=65, cache_lengths=(3, 129)),
    "empty caches": CaseShape(cache_lengths=(0, 0, 7), nodes=5),
    "tree across pages": CaseShape(cache_lengths=(15, 31), nodes=33),
    "prompt chunk": CaseShape(is_chain=True, nodes=40, cache_lengths=(0, 21)),
    "prompt chunk behind another": CaseShape(is_chain=True, nodes=17, node_offset=9),
    "second level of a tree": CaseShape(nodes=6, node_offset=30, cache_lengths=(11, 40)),
    "ragged": CaseShape(nodes=7, cache_lengths=(9, 0, 30), num_nodes=(3, 0, 7)),
    "ragged second level": CaseShape(nodes=7, cache_lengths=(9, 2), num_nodes=(7, 0), node_offset=3),
    "window": CaseShape(sliding_window=6, nodes=12, kind=TreeKind.CHAIN, cache_lengths=(40, 2)),
    "window second level": CaseShape(sliding_window=5, nodes=8, node_offset=9),
    "window prompt chunk": CaseShape(sliding_window=9, is_chain=True, nodes=30, cache_lengths=(0, 21)),
    "softcap": CaseShape(softcap=3.0),
    "scale": CaseShape(scale=0.2),
    "norms": CaseShape(has_norms=True),
    "multi query": CaseShape(query_heads=6, kv_heads=1),
    "no grouping, head_dim 80": CaseShape(query_heads=3, kv_heads=3, head_dim=80, page_size=32),
    "page 64, head_dim 96": CaseShape(head_dim=96, page_size=64),
    "page 128, head_dim 256": CaseShape(head_dim=256, page_size=128, query_heads=2),
    "bf16": CaseShape(dtype=torch.bfloat16, has_norms=True),
    "fp16": CaseShape(dtype=torch.float16, softcap=20.0),
}


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU path's result and the pool after it."""
    pool = case.pool.clone()
    plan = plan_attention(case.batch, case.spec, case.rope, pool)
    return tree_attention(case.qkv, pool[0], plan, case.norms), pool


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_result_equals_the_float64_definition(shape):
    case = make_case(shape)
    out, _ = run(case)
    expected = case.expected()
    assert (out.double() - expected.out).abs().max() < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_exactly_the_nodes_rows_are_stored(shape):
    case = make_case(shape)
    _, pool = run(case)
    expected = case.expected()
    stored = case.pool.clone()
    for b, length in enumerate(shape.cache_lengths):
        for node in range(shape.nodes if shape.num_nodes is None else shape.num_nodes[b]):
            page, row = divmod(length + shape.node_offset + node, shape.page_size)
            stored[0, case.batch.page_table[b, page], 0, row] = expected.keys[b, node].to(shape.dtype)
            stored[0, case.batch.page_table[b, page], 1, row] = expected.values[b, node].to(shape.dtype)
    # Rounding to the pool's dtype: two float32 ulps, or one unit of the 8- and 11-bit mantissas at magnitude 4.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 3.2e-2, torch.float16: 4e-3}[shape.dtype]
    torch.testing.assert_close(pool, stored, atol=tolerance, rtol=0, equal_nan=True)


def test_a_tree_grown_level_by_level_equals_the_whole_tree():
    whole = make_case(CaseShape(nodes=40, cache_lengths=(19, 4)))
    out, pool = run(whole)
    grown, parts = whole.pool.clone(), []
    for start, stop in ((0, 1), (1, 9), (9, 40)):
        batch = TreeBatch(
            positions=whole.batch.positions[:, start:stop],
            tree_mask=whole.batch.tree_mask[:, start:stop],
            cache_lengths=whole.batch.cache_lengths,
            page_table=whole.batch.page_table,
            node_offset=start,
        )
        plan = plan_attention(batch, whole.spec, whole.rope, grown)
        parts.append(tree_attention(whole.qkv[:, start:stop].contiguous(), grown[0], plan))
    torch.testing.assert_close(torch.cat(parts, dim=1), out, atol=2e-6, rtol=0)  # float32 sums in another order
    torch.testing.assert_close(grown, pool, atol=0, rtol=0, equal_nan=True)


def test_a_row_does_not_depend_on_its_batch():
    both = make_case(CaseShape(cache_lengths=(37, 5), nodes=8))
    out, _ = run(both)
    batch = TreeBatch(
        positions=both.batch.positions[1:],
        tree_mask=both.batch.tree_mask[1:],
        cache_lengths=both.batch.cache_lengths[1:],
        page_table=both.batch.page_table[1:],
    )
    pool = both.pool.clone()
    alone = tree_attention(both.qkv[1:], pool[0], plan_attention(batch, both.spec, both.rope, pool))
    torch.testing.assert_close(alone[0], out[1], atol=2e-6, rtol=0)  # float32 sums in another order


def test_a_tree_beyond_the_pages_is_refused():
    case = make_case(CaseShape(cache_lengths=(30,), nodes=2))
    too_long = TreeBatch(
        positions=case.batch.positions,
        tree_mask=case.batch.tree_mask,
        cache_lengths=case.batch.cache_lengths + 1,
        page_table=case.batch.page_table,
    )
    with pytest.raises(ConfigError, match="ends at slot 32, but page_table holds 2 pages of 16"):
        plan_attention(too_long, case.spec, case.rope, case.pool)


def test_fp8_pages_are_refused():
    case = make_case(CaseShape())
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        plan_attention(case.batch, case.spec, case.rope, case.pool.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AttentionSpec(num_query_heads=6, num_kv_heads=4, head_dim=64), "6 query heads cannot share 4"),
        (
            lambda: AttentionSpec(num_query_heads=4, num_kv_heads=4, head_dim=64, sliding_window=0),
            "sliding_window is 0",
        ),
        (
            lambda: TreeBatch(
                positions=torch.zeros(1, 33, dtype=torch.int32),
                tree_mask=torch.zeros(1, 33, 1, dtype=torch.int32),
                cache_lengths=torch.zeros(1, dtype=torch.int32),
                page_table=torch.zeros(1, 1, dtype=torch.int32),
            ),
            "1 words a row for 33 columns",
        ),
        (
            lambda: TreeBatch(
                positions=torch.zeros(1, 3, dtype=torch.int32),
                tree_mask=None,
                cache_lengths=torch.zeros(1, dtype=torch.int32),
                page_table=torch.zeros(1, 1, dtype=torch.int32),
            ),
            "tree_mask is None",
        ),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_rope_is_half_split():
    """With angle pi/2 everywhere, a root over an empty cache stores (-second half, first half) of its key."""
    case = make_case(CaseShape(cache_lengths=(0,), nodes=1, query_heads=1, kv_heads=1))
    quarter = RopeTable(torch.zeros(4, 32), torch.ones(4, 32))
    pool = case.pool.clone()
    tree_attention(case.qkv, pool[0], plan_attention(case.batch, case.spec, quarter, pool))
    key = case.qkv[0, 0, 64:128]
    stored = pool[0, case.batch.page_table[0, 0], 0, 0, 0]
    torch.testing.assert_close(stored, torch.cat([-key[32:], key[:32]]), atol=0, rtol=0)
