"""(g) One whole verify step of a small decoder, commit included, as one CUDA graph.

Draft tokens are given; verify, greedy acceptance and commit are tensor programs of fixed shape. B sequences, N nodes,
D head_dim, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu.machine import Machine
from gpu.problems import Problem, Shape, make_problem

from furcate.plugins.cache_commit.launch import launch_cache_commit
from furcate.plugins.tree_attention.launch import LayerInputs, launch_tree_attention

LAYERS = 4
LLAMA_WIDTHS = {"hidden": 4096, "inner": 14336, "vocabulary": 32000}
TOY_WIDTHS = {"hidden": 64, "inner": 96, "vocabulary": 50}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Random weights [out, in] of LAYERS layers."""

    embedding: torch.Tensor
    layers: list[dict[str, torch.Tensor]]


def make_decoder(problem: Problem, widths: dict[str, int]) -> Decoder:
    """A decoder of the problem's heads; weights scaled so that activations keep their size."""
    like, spec, hidden, inner = problem.inputs.qkv, problem.spec, widths["hidden"], widths["inner"]
    sizes = {
        "qkv": (spec.qkv_width, hidden),
        "out": (hidden, spec.num_query_heads * spec.head_dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, device=like.device) * columns**-0.5).to(like.dtype)

    layers = [{name: weight(*size) for name, size in sizes.items()} for _ in range(LAYERS)]
    return Decoder(embedding=weight(widths["vocabulary"], hidden) * hidden**0.5, layers=layers)


def verify(problem: Problem, decoder: Decoder, pool: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token choice [B, N] after every node."""
    x = decoder.embedding[tokens]
    launch = problem.launch()
    for layer, pages in zip(decoder.layers, pool, strict=True):
        qkv = F.linear(F.rms_norm(x, x.shape[-1:]), layer["qkv"])
        inputs = LayerInputs(qkv=qkv, pool=pages, page_size=problem.shape.page_size, kv_dtype=pool.dtype)
        out = launch_tree_attention(inputs, problem.batch, problem.spec, problem.rope, launch)
        x = x + F.linear(out, layer["out"])
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:]), layer["gate_up"]).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer["down"])
    return F.linear(F.rms_norm(x, x.shape[-1:]), decoder.embedding).argmax(dim=-1)


def accept(problem: Problem, tokens: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Deepest node whose whole path is what greedy decoding chose, as (path_nodes [B, N], num_accepted [B])."""
    ancestors = problem.is_ancestor
    num_nodes = tokens.shape[1]
    depth = ancestors.sum(dim=1)
    parent = torch.where(ancestors & (depth[None, :] == depth[:, None] - 1), 1, 0).argmax(dim=1)
    is_chosen = tokens == chosen[:, parent]
    is_chosen[:, 0] = True
    is_path = (is_chosen[:, None, :] | ~ancestors).all(dim=2)
    deepest = (is_path * depth).argmax(dim=1)
    on_path = ancestors[deepest]
    column = torch.arange(num_nodes, device=tokens.device)
    path = torch.where(on_path, column, num_nodes).sort(dim=1).values
    return path.clamp(max=num_nodes - 1).to(torch.int32), on_path.sum(dim=1).to(torch.int32)


def check_step(machine: Machine, shape: Shape) -> list[dict]:
    """Time of a replayed step, and whether replay and eager run leave the same tokens, counts and pool."""
    problem = make_problem(shape, machine.device)
    widths = TOY_WIDTHS if machine.is_toy else LLAMA_WIDTHS
    decoder = make_decoder(problem, widths)
    fresh = torch.stack([problem.inputs.pool] * LAYERS)
    tokens = torch.randint(widths["vocabulary"], problem.batch.positions.shape, device=machine.device)
    guided = verify(problem, decoder, fresh.clone(), tokens)
    if shape.nodes > 1:
        tokens[:, 1] = guided[:, 0]  # node 1 hangs on the root: at least one draft is accepted
    pool, results = fresh.clone(), {}

    def step() -> None:
        chosen = verify(problem, decoder, pool, tokens)
        path, accepted = accept(problem, tokens, chosen)
        lengths = launch_cache_commit(pool, problem.batch.page_table, problem.batch.cache_lengths, (path, accepted))
        results.update(chosen=chosen, accepted=accepted, lengths=lengths)

    step()
    eager = {name: tensor.clone() for name, tensor in results.items()}
    pool.copy_(fresh)
    us = machine.time_us(step)
    is_same = all(torch.equal(results[name], tensor) for name, tensor in eager.items())
    return [
        {
            "layers": LAYERS,
            "us": us,
            "accepted": eager["accepted"].tolist(),
            "ok": is_same and bool((eager["accepted"] >= min(2, shape.nodes)).all()),
        }
    ]
