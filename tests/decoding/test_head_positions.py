"""A head's own max_position_embeddings limits nothing: behind a longer prompt it drafts what a head of long texts drafts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

PROMPT = tuple(range(2, 122))


def drafted(executor: TorchExecutor, tree: str) -> list[Tensor]:
    """The trees of every step of a greedy text behind PROMPT."""
    assert executor.head is not None
    scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind, executor.head.num_heads))
    trees: list[Tensor] = []
    scheduler._step.on_step = lambda trace: trees.append(trace.tree.token_ids)
    scheduler.add(Request(request_id=0, prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=16)))
    while scheduler.sequences:
        scheduler.step()
    return trees


def with_max_positions(head: Path, copy: Path, max_positions: int) -> Path:
    """A copy of a head (or a draft model) whose config.json says so."""
    shutil.copytree(head, copy)
    config = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": max_positions}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture
def heads(tiny_heads, more_heads, tiny_target) -> dict[str, Path]:
    return {**tiny_heads, "hydra-prefix": more_heads["hydra-prefix"], "model": tiny_target}


@pytest.mark.parametrize("head", ["eagle3", "eagle", "hydra-prefix", "model"])
def test_drafts_behind_a_prompt_beyond_the_heads_own_positions_are_those_of_a_head_with_more(
    heads: dict[str, Path], engine_with: Callable[..., Path], tmp_path: Path, head: str
) -> None:
    trees = []
    for max_positions in (16, 512):
        path = with_max_positions(heads[head], tmp_path / f"{max_positions}", max_positions)
        trees.append(drafted(TorchExecutor(read_engine(engine_with(path))), "chain:3"))
    assert len(trees[0]) == len(trees[1]) >= 3
    assert all(map(torch.equal, *trees))


def test_positions_beyond_the_heads_own_are_told_apart(tiny_engine: Callable[..., Path]) -> None:
    """Every row of the rotary table is its own; the tiny head says 16 positions, the engine serves 400."""
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    assert executor.head_ops is not None and executor.head_ops.rope is not None
    table = executor.head_ops.rope.everywhere
    rows = torch.cat([table.cos, table.sin], dim=1)
    assert len(rows) >= 400
    assert len(rows.unique(dim=0)) == len(rows)
