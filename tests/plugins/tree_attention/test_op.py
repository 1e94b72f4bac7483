"""The torch operator: its CPU implementation, its contract with torch, and how a GPU call would be launched."""

from dataclasses import replace

import pytest
import torch

from furcate.plugins.tree_attention import op
from furcate.plugins.tree_attention.cases import CaseShape, make_case


def test_operator_equals_the_definition():
    case = make_case(CaseShape(nodes=12, num_nodes=(12, 3), has_norms=True, softcap=20.0, sliding_window=30))
    pool = case.pool.clone()
    out = op.tree_attention((case.qkv, pool[0]), case.batch, (case.spec, case.rope), case.norms)
    expected = case.expected()
    assert (out.double() - expected.out).abs().max() < 5e-6  # float32 sums of some hundred products of order 1
    assert not torch.equal(pool.nan_to_num(9), case.pool.nan_to_num(9))


def test_both_kinds_of_plan_give_the_same():
    """A pass on a GPU goes through the operator, one on the CPU through its plan; here both run on the CPU."""
    case = make_case(CaseShape(nodes=6, has_norms=True))
    plans = (
        op.plan_attention(case.batch, case.spec, case.rope, case.pool),
        op.KernelPlan(case.batch, case.spec, case.rope),
    )
    outs = [op.attend(case.qkv, case.pool[0].clone(), plan, case.norms) for plan in plans]
    assert not isinstance(plans[0], op.KernelPlan)
    assert torch.equal(*outs)


def arguments_of(case):
    batch, spec = case.batch, case.spec
    return (
        case.qkv, case.pool[0].nan_to_num(0), batch.positions, batch.tree_mask, None, batch.cache_lengths,
        batch.page_table, case.rope.cos, case.rope.sin, None, None, None, 0, False, spec.num_query_heads,
        spec.num_kv_heads, None, None, None, 1e-6,
    )  # fmt: skip


def test_torch_finds_the_operator_well_formed():
    """Schema, what it mutates, and its shapes without data (opcheck also refuses outputs that alias inputs)."""
    checks = ("test_schema", "test_faketensor")
    arguments = arguments_of(make_case(CaseShape()))
    result = torch.library.opcheck(torch.ops.furcate.tree_attention.default, arguments, test_utils=checks)
    assert result == dict.fromkeys(checks, "SUCCESS")


def test_launch_on_a_gpu_follows_from_shapes(monkeypatch):
    """Eight sequences of 8192 slots, 16 nodes in groups of four: 64 rows in one block, four splits fill 264 slots.

    Tensors without data: a launch that read a value back to the host could not be captured in a CUDA graph.
    """
    case = make_case(
        CaseShape(cache_lengths=(1,) * 8, nodes=16, query_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    ).to("meta")
    pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
    monkeypatch.setattr(op, "_device", lambda index: (90, 132))
    launch_module = op._kernel_module()
    batch = replace(case.batch, page_table=torch.zeros(8, 512, dtype=torch.int32, device="meta"))
    inputs = launch_module.LayerInputs(qkv=case.qkv, pool=case.pool[0], page_size=16, kv_dtype=torch.bfloat16)
    launch = op.launch_for(inputs, batch, case.spec)
    assert (launch.tactic.block_m, launch.num_splits) == (64, 4)
