"""Shapes of a step: what it yields is as wide as an accepted path, however many candidates a level drafts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.drafters.proposer import Committed
from furcate.decoding.executors.executor import CommitRows
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.step import StepResult

BATCH = 3


@pytest.fixture(scope="module")
def executors(tiny_engine: Callable[..., Path], model_executors: dict[str, TorchExecutor]) -> dict[str, TorchExecutor]:
    """A head that is hardly ever right, and a draft model that often is."""
    return {"eagle3": TorchExecutor(read_engine(tiny_engine("eagle3"))), "noisy": model_executors["noisy"]}


def texts_of(scheduler: Scheduler) -> dict[int, tuple[int, ...]]:
    """Greedy and sampled texts of a batch, prompts of different lengths."""
    for index in range(BATCH):
        sampling = SamplingParams(max_tokens=12, temperature=0.6 * index, seed=index)
        scheduler.add(Request(request_id=index, prompt_ids=tuple(range(2, 9 + 20 * index)), sampling=sampling))
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(range(BATCH), ())
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
    return texts


# name: (nodes of a tree, depth of its deepest node)
WIDE_TREES = {"dynamic:8/0/7": (8, 1), "dynamic:25/1/5": (25, 2), "mc_sim_7b_63": (64, 4)}


@pytest.mark.parametrize("drafter", ["eagle3", "noisy"])
@pytest.mark.parametrize("name", WIDE_TREES)
def test_what_a_step_yields_is_as_wide_as_a_path_not_as_the_draft(executors, monkeypatch, name, drafter):
    executor, (num_nodes, depth) = executors[drafter], WIDE_TREES[name]
    scheduler = Scheduler(executor, parse_tree(name, executor.manifest.head_kind), Acceptance.MATCH)
    step, proposer = scheduler._step, scheduler._step.proposer
    results: list[StepResult] = []
    committed: list[Committed] = []
    moved: list[CommitRows] = []
    run, observe, commit = step.run, proposer.observe, executor.commit
    monkeypatch.setattr(step, "run", lambda rows: results.append(run(rows)) or results[-1])
    monkeypatch.setattr(proposer, "observe", lambda rows: committed.append(rows) or observe(rows))
    monkeypatch.setattr(executor, "commit", lambda rows: moved.append(rows) or commit(rows))
    assert texts_of(scheduler) == texts_of(Scheduler(executor, parse_tree("single", None), Acceptance.MATCH))

    assert max(int(result.num_nodes.max()) for result in results) == num_nodes
    for result in results:
        batch = len(result.num_tokens)
        assert result.token_ids.shape == result.chosen_logits.shape == (batch, depth + 1)
        assert result.num_tokens.max() <= depth + 1
        assert result.states.shape[0] == batch
        assert result.states.shape[1:] == results[0].states.shape[1:]
    if drafter == "noisy":
        assert max(int(result.num_tokens.max()) for result in results) > 1
    for rows in moved:
        assert rows.path_nodes.shape == (len(rows.num_accepted), depth + 1)
        assert rows.path_nodes.max() < num_nodes
    for rows in committed:
        if not rows.is_prompt:
            width = int(rows.counts.max())
            assert rows.next_ids.shape[1] == width
            assert rows.features is None or rows.features.shape[1] == width


@pytest.mark.parametrize("head", ["eagle3", "eagle", "medusa"])
def test_rows_that_were_never_written_are_never_read(tiny_engine, head):
    """Every K/V row starts as NaN, in the target's pool and the head's."""
    executor = TorchExecutor(read_engine(tiny_engine(head)))
    tree = parse_tree("dynamic:12/1/4", executor.manifest.head_kind, num_heads=3)
    expected = texts_of(Scheduler(executor, tree))
    pools = [pool for pool in (executor.target_pool, executor.head_pool) if pool is not None]
    for pool in pools:
        pool.fill_(torch.nan)
    assert texts_of(Scheduler(executor, tree)) == expected
    assert all(pool.isnan().any() for pool in pools)
