"""The kernel, interpreted, against the float64 definition: every tree, size, type and option it is used with."""

from dataclasses import replace

import pytest
import torch

from furcate.plugins.tree_attention.cases import Case, CaseShape, TreeKind, make_case
from furcate.plugins.tree_attention.spec import HEAD_DIMS, PAGE_SIZES

launch_module = pytest.importorskip("furcate.plugins.tree_attention.launch", reason="pip install 'furcate[gpu]'")
tactics = pytest.importorskip("furcate.plugins.tree_attention.tactics")

SMALL = tactics.Tactic(block_m=16, block_n=32, block_t=16, num_warps=4, num_stages=2)
WIDE = tactics.Tactic(block_m=64, block_n=64, block_t=32, num_warps=4, num_stages=3)
# float32: some hundred products of order 1. bf16 rounds q, k, the weights and the result to 8 bits, fp16 to 11.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}

SHAPES = {
    "random tree": CaseShape(nodes=21, cache_lengths=(70, 5)),
    "chain tree": CaseShape(kind=TreeKind.CHAIN, nodes=13),
    "star": CaseShape(kind=TreeKind.STAR, nodes=9),
    "single node": CaseShape(nodes=1, cache_lengths=(33, 32, 31)),
    "31 nodes": CaseShape(nodes=31, cache_lengths=(40,)),
    "32 nodes": CaseShape(nodes=32, cache_lengths=(3,)),
    "33 nodes": CaseShape(nodes=33, cache_lengths=(17,)),
    "64 nodes": CaseShape(nodes=64, cache_lengths=(5,), query_heads=2),
    "65 nodes": CaseShape(nodes=65, cache_lengths=(31,), query_heads=2),
    "128 nodes": CaseShape(nodes=128, cache_lengths=(20,), query_heads=1, kv_heads=1),
    "empty and ragged caches": CaseShape(cache_lengths=(0, 97, 1), nodes=5),
    "prompt chunk": CaseShape(is_chain=True, nodes=40, cache_lengths=(0, 21)),
    "prompt chunk behind another": CaseShape(is_chain=True, nodes=17, node_offset=9),
    "second level of a tree": CaseShape(nodes=6, node_offset=30, cache_lengths=(11, 40)),
    "second level across words": CaseShape(nodes=20, node_offset=49, cache_lengths=(11,)),
    "ragged": CaseShape(nodes=7, cache_lengths=(9, 0, 30), num_nodes=(3, 0, 7)),
    "ragged second level": CaseShape(nodes=7, cache_lengths=(9, 2), num_nodes=(7, 0), node_offset=3),
    "window": CaseShape(sliding_window=6, nodes=12, kind=TreeKind.CHAIN, cache_lengths=(75, 2)),
    "window across words": CaseShape(sliding_window=5, nodes=12, node_offset=25, kind=TreeKind.CHAIN),
    "window prompt chunk": CaseShape(sliding_window=9, is_chain=True, nodes=30, cache_lengths=(0, 51)),
    "softcap": CaseShape(softcap=3.0),
    "scale": CaseShape(scale=0.2),
    "norms": CaseShape(has_norms=True),
    "norms, head_dim 80": CaseShape(has_norms=True, head_dim=80),
    "multi query": CaseShape(query_heads=6, kv_heads=1),
    "no grouping, head_dim 80, page 32": CaseShape(query_heads=3, kv_heads=3, head_dim=80, page_size=32),
    "head_dim 96, page 64": CaseShape(head_dim=96, page_size=64, cache_lengths=(100, 3)),
    "head_dim 128, page 128": CaseShape(head_dim=128, page_size=128, cache_lengths=(130,)),
    "head_dim 256": CaseShape(head_dim=256, query_heads=2, cache_lengths=(20,)),
    "bf16": CaseShape(dtype=torch.bfloat16, has_norms=True, cache_lengths=(70, 5)),
    "fp16": CaseShape(dtype=torch.float16, softcap=20.0, cache_lengths=(70, 5)),
}


def stored_pool(case: Case, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The case's pool after its valid nodes were stored."""
    shape, pool = case.shape, case.pool.clone()
    for b, length in enumerate(shape.cache_lengths):
        for node in range(shape.nodes if shape.num_nodes is None else shape.num_nodes[b]):
            page, row = divmod(length + shape.node_offset + node, shape.page_size)
            pool[0, case.batch.page_table[b, page], 0, row] = keys[b, node].to(shape.dtype)
            pool[0, case.batch.page_table[b, page], 1, row] = values[b, node].to(shape.dtype)
    return pool


def check(interpreter, shape: CaseShape, launch, **options):
    case = make_case(shape)
    out, pool = interpreter("attention", case=case, launch=launch, pool=case.pool, **options)
    expected = case.expected()
    assert (out.double() - expected.out).abs().max() < TOLERANCE[shape.dtype]
    # Stored rows are rounded to the pool's type: two float32 ulps, or one unit of 8 or 11 bits at magnitude 4.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 3.2e-2, torch.float16: 4e-3}[shape.dtype]
    stored = stored_pool(case, expected.keys, expected.values)
    torch.testing.assert_close(pool, stored, atol=tolerance, rtol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_result_and_stored_rows_equal_the_definition(interpreter, shape):
    check(interpreter, shape, launch_module.Launch(tactic=SMALL))


@pytest.mark.parametrize(
    ("name", "splits"), [("random tree", 2), ("empty and ragged caches", 5), ("window", 3), ("ragged", 2), ("bf16", 3)]
)
def test_splits_of_the_prefix_change_nothing(interpreter, name, splits):
    """Five splits of an empty or one-block prefix leave splits without a block."""
    check(interpreter, SHAPES[name], launch_module.Launch(tactic=SMALL, num_splits=splits))


@pytest.mark.parametrize("name", ["random tree", "65 nodes", "prompt chunk", "second level across words", "fp16"])
def test_wide_tactic(interpreter, name):
    """Blocks of 64 rows and keys: several nodes and, with pages of 16, several pages a block."""
    check(interpreter, SHAPES[name], launch_module.Launch(tactic=WIDE))


BY_PARTS = {
    "head_dim 80, random tree": CaseShape(nodes=21, head_dim=80, cache_lengths=(70, 5), page_size=32),
    "head_dim 96, prompt chunk": CaseShape(nodes=20, head_dim=96, is_chain=True, cache_lengths=(0, 21)),
    "head_dim 128, second level, window, softcap, norms": CaseShape(
        nodes=9, head_dim=128, node_offset=30, sliding_window=20, softcap=3.0, has_norms=True, cache_lengths=(40,)
    ),
    "head_dim 256, ragged": CaseShape(nodes=7, head_dim=256, cache_lengths=(33, 0), num_nodes=(7, 3)),
}


@pytest.mark.parametrize("shape", BY_PARTS.values(), ids=BY_PARTS.keys())
def test_float32_of_wide_heads_by_parts(interpreter, shape):
    """The table's tactic: q.k is summed from the products of eight parts of the head."""
    tactic = tactics.choose_tactic(90, 64, shape.head_dim, 4)
    assert tactic.head_parts > 1
    check(interpreter, shape, launch_module.Launch(tactic=tactic, num_splits=2))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes_around_the_block_of_keys(interpreter, page_size):
    shape = CaseShape(page_size=page_size, cache_lengths=(129, 31), nodes=4)
    check(interpreter, shape, launch_module.Launch(tactic=WIDE, num_splits=2))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", TreeKind)
def test_every_page_size_head_dim_type_and_tree(interpreter, page_size, head_dim, dtype, kind):
    shape = CaseShape(
        page_size=page_size, head_dim=head_dim, dtype=dtype, kind=kind, nodes=33, cache_lengths=(129, 0, 31), seed=7
    )
    check(interpreter, shape, launch_module.Launch(tactic=WIDE, num_splits=2))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [200, 512])
def test_long_prompt_chunk(interpreter, nodes):
    shape = CaseShape(is_chain=True, nodes=nodes, cache_lengths=(0, 70), query_heads=2, kv_heads=1)
    check(interpreter, shape, launch_module.Launch(tactic=WIDE))


def test_pool_by_address(interpreter):
    check(interpreter, SHAPES["random tree"], launch_module.Launch(tactic=SMALL), is_address=True)


def test_first_columns_of_a_wider_page_table(interpreter):
    case = make_case(CaseShape(nodes=5, cache_lengths=(40, 3)))
    wider = torch.cat([case.batch.page_table, torch.full((2, 3), -1, dtype=torch.int32)], dim=1)
    narrow = replace(case, batch=replace(case.batch, page_table=wider[:, : case.batch.page_table.shape[1]]))
    outs = [
        interpreter("attention", case=c, launch=launch_module.Launch(tactic=SMALL), pool=c.pool)[0]
        for c in (case, narrow)
    ]
    assert not narrow.batch.page_table.is_contiguous()
    assert torch.equal(*outs)


def test_unpacked_groups_give_the_same(interpreter):
    shape = CaseShape(nodes=5, cache_lengths=(40,))
    check(interpreter, shape, launch_module.Launch(tactic=SMALL, num_splits=2, is_packed=False))


def test_chain_tree_equals_prompt_chunk(interpreter):
    """The mask of a chain and the causal rule without a mask are the same attention, bit for bit."""
    chain = make_case(CaseShape(kind=TreeKind.CHAIN, nodes=11, cache_lengths=(37, 4)))
    chunk = replace(chain, batch=replace(chain.batch, tree_mask=None, is_chain=True))
    launch = launch_module.Launch(tactic=SMALL)
    outs = [interpreter("attention", case=case, launch=launch, pool=case.pool)[0] for case in (chain, chunk)]
    assert torch.equal(*outs)


def permuted_case(case: Case, order: torch.Tensor) -> Case:
    """The same trees with their nodes in another order; the mask's columns move with its rows."""
    nodes = case.shape.nodes
    bits = (case.batch.tree_mask[:, :, torch.arange(nodes) // 32] >> (torch.arange(nodes) % 32)) & 1
    bits = bits[:, order][:, :, order].to(torch.int64)
    words = (bits << torch.arange(nodes)).sum(dim=2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)[:, :, None]
    batch = replace(case.batch, tree_mask=words, positions=case.batch.positions[:, order].contiguous())
    return replace(case, batch=batch, qkv=case.qkv[:, order].contiguous())


def test_order_of_nodes_does_not_matter(interpreter):
    case = make_case(CaseShape(nodes=23, cache_lengths=(37, 4)))
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    launch = launch_module.Launch(tactic=SMALL)
    out, _ = interpreter("attention", case=case, launch=launch, pool=case.pool)
    permuted = permuted_case(case, order)
    permuted_out, _ = interpreter("attention", case=permuted, launch=launch, pool=permuted.pool)
    torch.testing.assert_close(permuted_out, out[:, order], atol=2e-6, rtol=0)  # float32 sums in another order


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fp8_pages(interpreter, dtype):
    """Rows are stored as e4m3, and attention is that over the rows as stored, those of the tree itself included."""
    case = make_case(CaseShape(nodes=10, cache_lengths=(70, 5), dtype=dtype, has_fp8_pages=True))
    launch = launch_module.Launch(tactic=SMALL, num_splits=2)
    by_bytes = replace(case, pool=case.pool.view(torch.uint8))
    out, pool = interpreter("attention", case=by_bytes, launch=launch, pool=by_bytes.pool)
    expected = case.expected()
    # A number next to the middle of two e4m3 values may be stored as the other, which moves a score by up to 0.04.
    assert (out.double() - expected.out).abs().max() < TOLERANCE[dtype] + 1.5e-2
    by_half = case.kv_scales[:, None, None, None]
    real = replace(case, pool=case.pool.float() * by_half)
    stored = stored_pool(real, expected.keys, expected.values)
    read_back = pool.view(torch.float8_e4m3fn).float() * by_half
    assert torch.equal(read_back.isnan(), stored.isnan())
    # Both sides are products with the scale, in float32 and in the activations' type: half a unit of bf16.
    difference = (read_back - stored).abs() > stored.abs() * 4e-3
    assert int(difference.sum()) <= 4  # such ties, of 5120 stored numbers


def test_faults_of_the_interpreter_are_still_there_and_mended(interpreter):
    """Reproducers for triton 3.6.0: tl.dot on bf16 multiplies raw bits, the cast to e4m3 loses the rounding's carry.

    When this fails the mending in interpreted.py can go.
    """
    (dot_error, cast_errors), after = interpreter("errors_before_and_after_mending")
    assert dot_error > 1e6
    assert cast_errors > 0
    assert after == (0, 0)
