"""Acceptance rules by name: from the build to the manifest, the statistics and the refusals."""

import json

import pytest

from furcate.builder.acceptance_config import Acceptance, resolve_acceptance
from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError, RequestError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import parse_tree
from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.acceptor import DRAFT_KINDS
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler


def run(scheduler: Scheduler, sampling: SamplingParams) -> tuple[tuple[int, ...], object]:
    scheduler.add(Request(request_id=0, prompt_ids=tuple(range(5, 25)), sampling=sampling))
    text: tuple[int, ...] = ()
    while scheduler.sequences:
        (output,) = scheduler.step()
        text += output.token_ids
    return text, output.stats


def test_every_rule_has_a_name_and_every_name_a_rule_that_takes_its_trees():
    assert {acceptance.value for acceptance in Acceptance} - {"auto"} == RULES.keys()
    for acceptance, kind in DRAFT_KINDS.items():
        assert kind in RULES[acceptance.value].kinds
    for name, rule in RULES.items():
        assert Acceptance(name).is_lossless == rule.is_lossless


@pytest.mark.parametrize(
    ("head", "tree", "rule"),
    [
        (HeadKind.EAGLE3, "dynamic:12/3/3", "match"),
        (HeadKind.EAGLE3, "chain:3", "match"),
        (HeadKind.MODEL, "chain:3", "block"),
        (HeadKind.MODEL, "dynamic:12/3/3", "univer"),
        (HeadKind.MODEL, "single", "match"),
    ],
)
def test_auto_is_match_for_heads_and_draws_from_a_draft_model(head, tree, rule):
    assert resolve_acceptance(Acceptance.AUTO, parse_tree(tree, head), head) is Acceptance(rule)


def test_a_perfect_draft_model_is_always_accepted_when_it_is_drawn_from(model_executors):
    """Where its most probable tokens are offered instead, most samples of the target miss them."""
    executor = model_executors["itself"]
    tree = parse_tree("chain:3", HeadKind.MODEL)
    sampling = SamplingParams(max_tokens=33, temperature=1.0, seed=1)
    taus = {rule: run(Scheduler(executor, tree, Acceptance(rule)), sampling)[1].tau for rule in ("block", "match")}
    assert taus["block"] == 4
    assert taus["match"] < 2


@pytest.mark.parametrize(
    ("acceptance", "tree", "sentence"),
    [
        ("block", "mc_sim_7b_63", "it verifies one chain; use --tree chain:LENGTH"),
        ("block", "dynamic:12/3/3", "it verifies one chain"),
        ("multi_step", "dynamic:12/3/3", "would bias the text"),
        ("recursive", "dynamic:12/3/3", "would bias the text"),
        ("traversal", "cartesian:3,2/5", "would bias the text"),
    ],
)
def test_a_rule_is_refused_for_trees_on_which_it_would_not_be_exact(tiny_engine, acceptance, tree, sentence):
    config = parse_tree(tree, HeadKind.EAGLE3)
    with pytest.raises(ConfigError, match=sentence):
        resolve_acceptance(Acceptance(acceptance), config)


def test_typical_is_marked_lossy_in_the_manifest_and_in_every_requests_statistics(tiny_engine):
    path = tiny_engine("eagle3", acceptance=Acceptance.TYPICAL)
    value = json.loads((path / "manifest.json").read_text())
    assert (value["acceptance"], value["is_lossless"]) == ("typical", False)
    scheduler = Scheduler(TorchExecutor(read_engine(path)))
    _, stats = run(scheduler, SamplingParams(max_tokens=12, temperature=1.0, seed=1))
    assert not stats.is_lossless
    exact = Scheduler(scheduler.executor, acceptance=Acceptance.MATCH)
    assert run(exact, SamplingParams(max_tokens=12, temperature=1.0, seed=1))[1].is_lossless
    # At temperature 0 it is greedy decoding, still said to be what it is.
    greedy, stats = run(scheduler, SamplingParams(max_tokens=12))
    assert greedy == run(exact, SamplingParams(max_tokens=12))[0]
    assert not stats.is_lossless


def test_an_engine_that_accepts_greedily_refuses_a_temperature(tiny_engine):
    scheduler = Scheduler(TorchExecutor(read_engine(tiny_engine("eagle3"))), acceptance=Acceptance.GREEDY)
    with pytest.raises(RequestError, match=r"temperature is 0\.5, and this engine accepts greedily; send 0"):
        run(scheduler, SamplingParams(max_tokens=4, temperature=0.5))
    assert len(run(scheduler, SamplingParams(max_tokens=4))[0]) == 4


@pytest.mark.parametrize("acceptance", ["multi_step", "recursive", "traversal", "univer", "block"])
def test_a_rows_text_is_the_same_alone_and_in_company_and_greedy_rows_are_greedy(tiny_engine, acceptance):
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    tree = parse_tree("chain:3" if acceptance == "block" else "expansion:2,2,1", HeadKind.EAGLE3)
    params = [
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=12, temperature=0.8, seed=1),
        SamplingParams(max_tokens=20, temperature=1.3, top_k=9, seed=2),
    ]
    prompts = [tuple(range(5, 25)), (9,), tuple(range(40, 90))]
    together = Scheduler(executor, tree, Acceptance(acceptance))
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        together.add(Request(request_id=index, prompt_ids=prompt, sampling=sampling))
    texts = {0: (), 1: (), 2: ()}
    while together.sequences:
        for output in together.step():
            texts[output.request_id] += output.token_ids
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        alone = Scheduler(executor, tree, Acceptance(acceptance))
        alone.add(Request(request_id=index, prompt_ids=prompt, sampling=sampling))
        text: tuple[int, ...] = ()
        while alone.sequences:
            (output,) = alone.step()
            text += output.token_ids
        assert texts[index] == text
    plain = Scheduler(executor, parse_tree("single", None), Acceptance.MATCH)
    assert texts[0] == run(plain, params[0])[0]
