"""Large attention problems made on the device: one tree for all sequences, shuffled pages.

B sequences, N nodes, P pages of a sequence, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from furcate.plugins.tree_attention.cases import TreeKind, depths_of, mask_words, random_parents, rope_table
from furcate.plugins.tree_attention.launch import Launch, LayerInputs, launch_tree_attention
from furcate.plugins.tree_attention.model import Workload
from furcate.plugins.tree_attention.op import launch_for
from furcate.plugins.tree_attention.spec import AttentionSpec, RopeTable, TreeBatch
from furcate.plugins.tree_attention.tactics import Tactic

TOY_TACTIC = Tactic(block_m=16, block_n=32, block_t=16, num_warps=4, num_stages=2)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a timed call; Llama's head_dim and pages unless --toy."""

    batch: int
    prefix: int
    nodes: int
    group: int
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    def toy(self) -> Shape:
        """The same call small enough for the interpreter."""
        return Shape(
            batch=min(self.batch, 2),
            prefix=self.prefix // 256,
            nodes=min(self.nodes, 5),
            group=min(self.group, 2),
            kv_heads=1,
            head_dim=64,
            page_size=16,
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything a call needs, on the device."""

    shape: Shape
    spec: AttentionSpec
    batch: TreeBatch
    rope: RopeTable
    inputs: LayerInputs
    is_ancestor: torch.Tensor
    """bool [N, N]: column j is node i or its ancestor."""

    @property
    def workload(self) -> Workload:
        """The same for the static model."""
        s = self.shape
        return Workload(spec=self.spec, batch=s.batch, prefix=s.prefix, nodes=s.nodes)

    def launch(self, **changes) -> Launch:
        """How furcate would run it, with changes."""
        is_toy = self.inputs.qkv.device.type == "cpu"
        chosen = Launch(tactic=TOY_TACTIC, num_splits=2) if is_toy else launch_for(self.inputs, self.batch, self.spec)
        known = {"tactic": chosen.tactic, "num_splits": chosen.num_splits}
        return Launch(**{**known, **changes})

    def run(self, launch: Launch) -> torch.Tensor:
        """One call of the kernel."""
        return launch_tree_attention(self.inputs, self.batch, self.spec, self.rope, launch)


def make_problem(shape: Shape, device: str) -> Problem:
    """A random problem of that shape, the same every time."""
    torch.manual_seed(0)
    spec = AttentionSpec(
        num_query_heads=shape.kv_heads * shape.group, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    pages = -(-(shape.prefix + shape.nodes) // shape.page_size)
    parents = random_parents(shape.nodes, TreeKind.RANDOM, torch.Generator().manual_seed(0))
    words, depths = mask_words(parents).to(device), torch.tensor(depths_of(parents), dtype=torch.int32, device=device)
    lengths = torch.full((shape.batch,), shape.prefix, dtype=torch.int32, device=device)
    order = torch.randperm(shape.batch * pages, device=device).to(torch.int32)
    batch = TreeBatch(
        positions=(lengths[:, None] + depths).contiguous(),
        tree_mask=words.expand(shape.batch, -1, -1).contiguous(),
        cache_lengths=lengths,
        page_table=order.view(shape.batch, pages),
    )
    pool_shape = (shape.batch * pages, 2, shape.page_size, shape.kv_heads, shape.head_dim)
    pool = torch.empty(pool_shape, dtype=dtype, device=device).normal_()
    qkv = torch.randn(shape.batch, shape.nodes, spec.qkv_width, device=device).to(dtype)
    table = rope_table(shape.prefix + shape.nodes + 1, shape.head_dim)
    column = torch.arange(shape.nodes, device=device)
    return Problem(
        shape=shape,
        spec=spec,
        batch=batch,
        rope=RopeTable(table.cos.to(device), table.sin.to(device)),
        inputs=LayerInputs(qkv=qkv, pool=pool, page_size=shape.page_size, kv_dtype=dtype),
        is_ancestor=((words[:, column // 32] >> (column % 32)) & 1).bool(),
    )
