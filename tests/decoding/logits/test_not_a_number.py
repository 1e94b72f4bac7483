"""A request whose logits are NaN ends with one sentence; the others, and whoever gets its pages next, see nothing of it."""

import pytest
import torch

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import FinishReason, Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

POISON = 290
"""A token of no prompt but one; its embedding is NaN, and so is all that is computed from it."""


def poison(executor: TorchExecutor) -> None:
    tensors = executor.target_ops._tensors
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].clone()
    tensors["embed_tokens.weight"][POISON] = torch.nan


def run_all(scheduler, requests):
    for request in requests:
        scheduler.add(request)
    texts, last = {request.request_id: () for request in requests}, {}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
            last[output.request_id] = output
    return texts, last


@pytest.mark.parametrize("tree", ["single", "chain:3", "dynamic:12/3/3"])
def test_nan_ends_one_request_with_a_sentence_and_leaves_the_others_alone(tiny_engine, tree):
    engine = read_engine(tiny_engine("eagle3", max_pool_tokens=512, max_context_tokens=150))
    fine = [
        Request(request_id=0, prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=30)),
        Request(request_id=1, prompt_ids=(9, 6), sampling=SamplingParams(max_tokens=30, temperature=0.9, seed=4)),
    ]
    executor = TorchExecutor(engine)
    expected, _ = run_all(Scheduler(executor, parse_tree("single", executor.head.kind, 0)), fine)
    poison(executor)
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=1)):
        scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind, 0))
        prompt = (POISON, *range(2, 90))
        texts, last = run_all(scheduler, [fine[0], Request(request_id=7, prompt_ids=prompt, sampling=params), fine[1]])
        assert texts == expected | {7: ()}
        assert last[7].finish_reason is FinishReason.CANCELLED
        assert "not finite numbers" in last[7].error
        # Its pages, full of NaN, are given to others, who must not read them.
        assert run_all(scheduler, fine)[0] == expected


@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [
        ("chain:3", Acceptance.BLOCK),
        ("chain:3", Acceptance.MULTI_STEP),
        ("mc_sim_7b_63", Acceptance.TRAVERSAL),
        ("mc_sim_7b_63", Acceptance.RECURSIVE),
        ("dynamic:12/3/3", Acceptance.UNIVER),
        ("dynamic:12/3/3", Acceptance.TYPICAL),
    ],
)
def test_every_rule_ends_a_request_of_nan_and_of_nothing_allowed(tiny_engine, tree, acceptance):
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    poison(executor)
    scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind, 0), acceptance)
    common = {"max_tokens": 20, "temperature": 0.9, "seed": 2}
    params = [
        SamplingParams(**common, embedding_bias=((POISON, 60.0),), bad_sequences=((5, POISON),)),
        SamplingParams(**common),
        SamplingParams(
            **common, embedding_bias=((50, 90.0),), bad_sequences=tuple((6, 50, token) for token in range(300))
        ),
    ]
    requests = [Request(request_id=i, prompt_ids=(3, 5 + i // 2), sampling=s) for i, s in enumerate(params)]
    texts, last = run_all(scheduler, requests)
    assert texts[0][-1] == POISON
    assert "not finite numbers" in last[0].error
    assert last[1].finish_reason is FinishReason.LENGTH
    assert len(texts[2]) == 1
    assert "no token may come next" in last[2].error


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_in_mid_text_ends_it_there(tiny_engine, temperature):
    """The poisoned token is written by the answer itself, inside a drafted path or as its bonus."""
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    poison(executor)
    bias = ((POISON, 60.0),)
    sampling = SamplingParams(
        max_tokens=30, temperature=temperature, seed=0, embedding_bias=bias, bad_sequences=((5, POISON),)
    )
    for tree in ("single", "dynamic:12/3/3"):
        scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind, 0))
        texts, last = run_all(scheduler, [Request(request_id=0, prompt_ids=(3, 5), sampling=sampling)])
        assert len(texts[0]) == 2
        assert texts[0][-1] == POISON
        assert "not finite numbers" in last[0].error
