"""Attention problems of a given shape: random trees over a paged pool whose unwritten rows are NaN.

The tests and benchmarks/gpu_check.py draw from here, so that a GPU sees the shapes the interpreter was checked on.

B batch, N nodes, W mask words, P pages of a sequence, H heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from furcate.plugins.tree_attention.reference import ReferenceModel, ReferenceResult, reference_tree_attention
from furcate.plugins.tree_attention.spec import AttentionSpec, HeadNorms, RopeTable, TreeBatch


class TreeKind(StrEnum):
    """How parents are drawn."""

    RANDOM = "random"
    CHAIN = "chain"
    STAR = "star"


@dataclass(frozen=True, kw_only=True)
class CaseShape:
    """The sizes of a problem; `cache_lengths` has one entry per sequence, `num_nodes` too where it is ragged."""

    cache_lengths: tuple[int, ...] = (37, 5)
    nodes: int = 8
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kind: TreeKind = TreeKind.RANDOM
    node_offset: int = 0
    num_nodes: tuple[int, ...] | None = None
    is_chain: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    has_norms: bool = False
    has_fp8_pages: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem; `pool` is [1, pages, 2, page_size, Hkv, D] with NaN wherever no cached row lies."""

    shape: CaseShape
    spec: AttentionSpec
    batch: TreeBatch
    rope: RopeTable
    norms: HeadNorms | None
    qkv: torch.Tensor
    pool: torch.Tensor
    kv_scales: torch.Tensor | None = None
    """float32 [2] of keys and values, with fp8 pages."""

    def expected(self) -> ReferenceResult:
        """The definition's result; with fp8 pages keys and values are those that the pages can hold."""
        if self.kv_scales is None:
            model = ReferenceModel(self.spec, self.rope, self.norms)
            return reference_tree_attention(self.qkv, self.pool[0], self.batch, model)
        scales = self.kv_scales.double()

        def as_stored(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = (
                (x / s).to(torch.float8_e4m3fn).double() * s for x, s in zip((keys, values), scales, strict=True)
            )
            return key, value

        pool = self.pool[0].double() * scales[:, None, None, None]
        model = ReferenceModel(self.spec, self.rope, self.norms, as_stored)
        return reference_tree_attention(self.qkv, pool, self.batch, model)

    def to(self, device: str) -> Case:
        """The same problem on another device."""
        batch, norms = self.batch, self.norms
        moved = {
            name: getattr(batch, name)
            for name in ("positions", "tree_mask", "cache_lengths", "page_table", "num_nodes")
        }
        return replace(
            self,
            batch=replace(batch, **{name: None if t is None else t.to(device) for name, t in moved.items()}),
            rope=RopeTable(self.rope.cos.to(device), self.rope.sin.to(device)),
            norms=None if norms is None else HeadNorms(norms.query.to(device), norms.key.to(device)),
            qkv=self.qkv.to(device),
            pool=self.pool.to(device),
            kv_scales=None if self.kv_scales is None else self.kv_scales.to(device),
        )


def random_parents(num_nodes: int, kind: TreeKind, generator: torch.Generator) -> list[int]:
    """Parent of every node; the root's is itself. Ancestors precede descendants."""
    parents = [0]
    for node in range(1, num_nodes):
        drawn = int(torch.randint(node, (1,), generator=generator))
        parents.append({TreeKind.RANDOM: drawn, TreeKind.CHAIN: node - 1, TreeKind.STAR: 0}[kind])
    return parents


def mask_words(parents: list[int]) -> torch.Tensor:
    """Ancestor words [N, W] int32, LSB first, of the tree with these parents."""
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if node else 0) | 1 << node)
    num_words = math.ceil(len(parents) / 32)
    words = torch.tensor([[(row >> 32 * w) & 0xFFFFFFFF for w in range(num_words)] for row in rows], dtype=torch.int64)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def depths_of(parents: list[int]) -> list[int]:
    """Depth of every node, the root's being 0."""
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        assert parent < node
        depths.append(depths[parent] + 1)
    return depths


def rope_table(num_positions: int, head_dim: int, theta: float = 10000.0) -> RopeTable:
    """Plain rotary table, computed in float64 and stored in float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return RopeTable(angles.cos().float(), angles.sin().float())


def make_case(shape: CaseShape) -> Case:
    """A problem of that shape, the same for the same seed."""
    generator = torch.Generator().manual_seed(shape.seed)
    spec = AttentionSpec(
        num_query_heads=shape.query_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        softcap=shape.softcap,
        sliding_window=shape.sliding_window,
    )
    total = shape.node_offset + shape.nodes
    kind = TreeKind.CHAIN if shape.is_chain else shape.kind
    trees = [random_parents(total, kind, generator) for _ in shape.cache_lengths]
    depths = torch.tensor([depths_of(tree)[shape.node_offset :] for tree in trees], dtype=torch.int32)
    cache_lengths = torch.tensor(shape.cache_lengths, dtype=torch.int32)
    positions = cache_lengths[:, None] + depths
    page_table, num_pages = _page_table(shape, total, generator)
    batch = TreeBatch(
        positions=positions,
        tree_mask=None if shape.is_chain else torch.stack([mask_words(t)[shape.node_offset :] for t in trees]),
        cache_lengths=cache_lengths,
        page_table=page_table,
        node_offset=shape.node_offset,
        num_nodes=None if shape.num_nodes is None else torch.tensor(shape.num_nodes, dtype=torch.int32),
        is_chain=shape.is_chain,
    )
    norms = None
    if shape.has_norms:
        norms = HeadNorms(*(1 + 0.2 * torch.randn(shape.head_dim, generator=generator) for _ in range(2)))
    qkv = torch.randn(len(trees), shape.nodes, spec.qkv_width, generator=generator).to(shape.dtype)
    pool = _poisoned_pool(shape, page_table, num_pages, generator)
    rope = rope_table(max(shape.cache_lengths) + total + 1, shape.head_dim)
    case = Case(shape=shape, spec=spec, batch=batch, rope=rope, norms=norms, qkv=qkv, pool=pool)
    if not shape.has_fp8_pages:
        return case
    scales = torch.tensor([0.02, 0.01])
    stored = (pool.float() / scales[:, None, None, None]).to(torch.float8_e4m3fn)
    return replace(case, pool=stored, kv_scales=scales)


def _page_table(shape: CaseShape, total_nodes: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Shuffled pages [B, P]; entries behind a sequence's last page are -1, and one page belongs to nobody."""
    needed = [math.ceil((length + total_nodes) / shape.page_size) for length in shape.cache_lengths]
    num_pages = sum(needed) + 1
    order = torch.randperm(num_pages, generator=generator).to(torch.int32)
    page_table = torch.full((len(needed), max(needed)), -1, dtype=torch.int32)
    start = 0
    for b, count in enumerate(needed):
        page_table[b, :count] = order[start : start + count]
        start += count
    return page_table, num_pages


def _poisoned_pool(
    shape: CaseShape, page_table: torch.Tensor, num_pages: int, generator: torch.Generator
) -> torch.Tensor:
    pool = torch.full((1, num_pages, 2, shape.page_size, shape.kv_heads, shape.head_dim), float("nan"))
    for b, length in enumerate(shape.cache_lengths):
        for slot in range(length + shape.node_offset):
            row = torch.randn(2, shape.kv_heads, shape.head_dim, generator=generator)
            pool[0, page_table[b, slot // shape.page_size], :, slot % shape.page_size] = row
    return pool.to(shape.dtype)
