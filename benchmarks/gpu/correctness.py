"""(a) About twenty shapes of the kernel, and the commit, against their float64 definitions."""

from __future__ import annotations

from dataclasses import replace

import torch
from gpu.machine import Machine
from gpu.problems import TOY_TACTIC

from furcate.plugins.cache_commit.launch import launch_cache_commit
from furcate.plugins.cache_commit.reference import reference_commit
from furcate.plugins.tree_attention.cases import Case, CaseShape, TreeKind, make_case
from furcate.plugins.tree_attention.launch import Launch, LayerInputs, launch_tree_attention
from furcate.plugins.tree_attention.op import launch_for

LLAMA = CaseShape(
    cache_lengths=(700, 129), nodes=16, query_heads=8, kv_heads=2, head_dim=128, page_size=64, dtype=torch.bfloat16
)
# bf16 rounds q, k, the weights and the result to 8 bits, fp16 to 11; float32 goes through three tf32 products.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
# A key next to the middle of two e4m3 values may be stored as the other: 16 units of 0.02 apart at magnitude 4.
FP8_STORED_TOLERANCE = 0.33
SHAPES = {
    "random tree": LLAMA,
    "one node": replace(LLAMA, nodes=1),
    "chain": replace(LLAMA, nodes=5, kind=TreeKind.CHAIN),
    "star": replace(LLAMA, nodes=31, kind=TreeKind.STAR),
    "64 nodes": replace(LLAMA, nodes=64),
    "65 nodes": replace(LLAMA, nodes=65),
    "128 nodes": replace(LLAMA, nodes=128),
    "empty cache": replace(LLAMA, cache_lengths=(0, 63, 64)),
    "ragged": replace(LLAMA, cache_lengths=(9, 0, 300), num_nodes=(3, 0, 16)),
    "second level": replace(LLAMA, nodes=20, node_offset=49),
    "prompt chunk": replace(LLAMA, is_chain=True, nodes=200, query_heads=4, kv_heads=1),
    "long cache": replace(LLAMA, cache_lengths=(3000,)),
    "page 16": replace(LLAMA, page_size=16),
    "page 128": replace(LLAMA, page_size=128),
    "head_dim 64": replace(LLAMA, head_dim=64),
    "head_dim 80": replace(LLAMA, head_dim=80),
    "head_dim 256": replace(LLAMA, head_dim=256, query_heads=4),
    "window": replace(LLAMA, sliding_window=100),
    "soft cap": replace(LLAMA, softcap=30.0, dtype=torch.float16),
    "head norms": replace(LLAMA, has_norms=True),
    "fp8 pages": replace(LLAMA, has_fp8_pages=True),
    "prompt chunk of 512": replace(LLAMA, is_chain=True, nodes=512, cache_lengths=(70,), query_heads=4, kv_heads=1),
    "float32": replace(LLAMA, head_dim=64, dtype=torch.float32),
}
TOY_SHAPES = {
    "random tree": CaseShape(nodes=5, cache_lengths=(37, 4), query_heads=2, kv_heads=1),
    "prompt chunk": CaseShape(nodes=6, cache_lengths=(17,), is_chain=True, query_heads=2, kv_heads=1),
}


def check_attention(machine: Machine) -> list[dict]:
    """A row per shape: largest error of the result and of the stored rows, and whether both are within tolerance."""
    rows = []
    for name, shape in (TOY_SHAPES if machine.is_toy else SHAPES).items():
        case = make_case(shape)
        expected = case.expected()
        moved = case.to(machine.device)
        inputs = LayerInputs(
            qkv=moved.qkv,
            pool=moved.pool[0],
            page_size=shape.page_size,
            kv_dtype=case.pool.dtype,
            norms=moved.norms,
            kv_scales=moved.kv_scales,
        )
        launch = Launch(tactic=TOY_TACTIC) if machine.is_toy else launch_for(inputs, moved.batch, case.spec)
        out = launch_tree_attention(inputs, moved.batch, case.spec, moved.rope, launch)
        error = float((out.cpu().double() - expected.out).abs().max())
        stored = stored_error(case, moved.pool.cpu(), expected.keys)
        tolerance = TOLERANCE[shape.dtype]
        is_stored = stored < (FP8_STORED_TOLERANCE if shape.has_fp8_pages else tolerance)
        rows.append({"shape": name, "error": error, "stored_error": stored, "ok": error < tolerance and is_stored})
    return rows


def stored_error(case: Case, pool: torch.Tensor, keys: torch.Tensor) -> float:
    """Largest error of a stored key; infinite where a row of padding was written."""
    worst = 0.0
    key_scale = 1.0 if case.kv_scales is None else float(case.kv_scales[0])
    for b, length in enumerate(case.shape.cache_lengths):
        valid = case.shape.nodes if case.shape.num_nodes is None else case.shape.num_nodes[b]
        for node in range(case.shape.nodes):
            page, row = divmod(length + case.shape.node_offset + node, case.shape.page_size)
            stored = pool[0, case.batch.page_table[b, page], 0, row].double() * key_scale
            if node < valid:
                worst = max(worst, float((stored - keys[b, node]).abs().max()))
            elif not bool(stored.isnan().all()):
                return float("inf")
    return worst


def check_commit(machine: Machine) -> list[dict]:
    """Overlapping moves of all layers."""
    torch.manual_seed(0)
    pool = torch.randn(3, 9, 2, 16, 2, 64).to(torch.bfloat16)
    page_table = torch.randperm(9)[:8].view(2, 4).to(torch.int32)
    lengths = torch.tensor([13, 0], dtype=torch.int32)
    path_nodes = torch.tensor([[0, 2, 3, 4, 21], [0, 1, 9, 30, 31]], dtype=torch.int32)
    accepted = torch.tensor([5, 3], dtype=torch.int32)
    expected = reference_commit(pool, page_table, lengths, path_nodes, accepted)
    moved = [t.to(machine.device) for t in (pool, page_table, lengths, path_nodes, accepted)]
    launch_cache_commit(*moved[:3], (moved[3], moved[4]))
    return [{"shape": "commit", "error": 0.0, "stored_error": 0.0, "ok": torch.equal(moved[0].cpu(), expected)}]
