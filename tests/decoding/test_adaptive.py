"""Adaptive budgets: the same text, trees only while they pay, and a drafter that catches up."""

import shutil
from dataclasses import replace

import pytest

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig
from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeConfig, TreeKind, parse_tree
from furcate.decoding.adaptive import FIRST_GAIN, SMALL_SHARE, Pulse, Rung, best_rung, smaller_tree
from furcate.decoding.compare import CompareConfig, compare
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.tune import TuneConfig, record, tune
from furcate.decoding.tune_measure import PassTimes

MEMORY_BOUND = PassTimes(verify_ms={1: 20, 4: 21, 16: 24, 64: 30}, draft_ms={0: 1, 1: 1.5, 8: 2})
CPU_LIKE = PassTimes(verify_ms={1: 20, 4: 28, 16: 40, 64: 110}, draft_ms={0: 1.5, 1: 2, 8: 3})
COMPUTE_BOUND = PassTimes(verify_ms={1: 10, 4: 34, 16: 130, 64: 514}, draft_ms={0: 1, 1: 1, 8: 3})
TREE = TreeConfig(kind=TreeKind.DYNAMIC, budget=16, depth=4, top_k=4)
PLAIN = TreeConfig(kind=TreeKind.SINGLE, budget=1)
RUNGS = [Rung.of(PLAIN, 0.0), Rung.of(smaller_tree(TREE), SMALL_SHARE), Rung.of(TREE, 1.0)]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("times", [MEMORY_BOUND, CPU_LIKE, COMPUTE_BOUND], ids=["memory", "cpu", "compute"])
def test_text_that_is_never_predicted_costs_at_most_a_twentieth_more(times, batch):
    pulses = [Pulse() for _ in range(batch)]
    spent, num_tokens = 0.0, 256
    for _ in range(num_tokens):
        rung = best_rung(RUNGS, times, pulses)
        spent += RUNGS[rung].step_ms(times, batch)
        for pulse in pulses:
            if rung == 0:
                pulse.num_plain += 1
            else:
                pulse.learn(0, RUNGS[rung].share)
    assert spent <= 1.05 * num_tokens * RUNGS[0].step_ms(times, batch)


def test_what_is_accepted_often_gets_the_whole_tree_and_hope_returns_in_time():
    lucky, unlucky = Pulse(gain=3.5), Pulse(gain=0.0)
    assert best_rung(RUNGS, MEMORY_BOUND, [lucky]) == 2
    assert best_rung(RUNGS, MEMORY_BOUND, [unlucky]) == 0
    unlucky.num_plain = unlucky.wait
    assert unlucky.hoped_gain == FIRST_GAIN
    assert best_rung(RUNGS, MEMORY_BOUND, [unlucky]) > 0


def test_a_large_batch_wants_smaller_trees():
    chosen = [best_rung(RUNGS, CPU_LIKE, [Pulse(gain=3.5)] * batch) for batch in (1, 4, 32)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_where_each_sequence_has_its_own_cost_nodes_are_cheaper_than_steps():
    pulses = [Pulse(gain=2.0)] * 32
    own_costs = replace(CPU_LIKE, verify_sequence_ms=5.0, draft_sequence_ms=0.1)
    assert best_rung(RUNGS, CPU_LIKE, pulses) == 0
    assert best_rung(RUNGS, own_costs, pulses) == 1
    assert own_costs.verify(32, 32) == CPU_LIKE.verify(32) + 31 * 5.0


@pytest.mark.parametrize("text", ["chain:5", "chain:1", "mc_sim_7b_63", "dynamic:60/7/10", "dynamic:2/0/1"])
def test_smaller_trees_are_trees_of_the_same_kind_and_no_larger(text):
    tree = parse_tree(text, HeadKind.EAGLE3)
    small = smaller_tree(tree)
    assert small.kind is tree.kind
    assert small.budget <= min(tree.budget, 6)
    assert 1 <= small.max_depth <= tree.max_depth


def texts_of(scheduler: Scheduler, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    texts = {}
    for index, sampling in enumerate(params):
        prompt = tuple(range(5 + index, 15 + 9 * index))
        scheduler.add(Request(request_id=index, prompt_ids=prompt, sampling=sampling))
        texts[index] = ()
    step = 0
    while scheduler.sequences:
        if scheduler._ladder is not None:
            # Trees too dear to be used, then cheap, then dear again: every change of step is passed.
            scheduler._ladder.times = COMPUTE_BOUND if step // 5 % 2 == 0 else MEMORY_BOUND
            for pulse in scheduler._ladder.pulses.values():
                pulse.gain = 3.0 if step // 5 % 2 else 0.0
                pulse.num_plain = 0
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
        step += 1
    assert scheduler.num_allocated_pages == 0
    assert not scheduler._ladder or not scheduler._ladder.pulses
    return [texts[index] for index in range(len(params))]


PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3),
    SamplingParams(max_tokens=35, temperature=1.2, top_k=20, seed=4),
]


@pytest.mark.parametrize("head", ["eagle3", "medusa", "itself"])
def test_texts_do_not_depend_on_the_budget(tiny_engine, model_executors, head):
    executor = model_executors[head] if head == "itself" else TorchExecutor(read_engine(tiny_engine(head)))
    tree = parse_tree("dynamic:12/2/3", executor.manifest.head_kind, num_heads=3)
    adaptive = texts_of(Scheduler(executor, tree, Acceptance.MATCH, is_adaptive=True), PARAMS)
    assert adaptive == texts_of(Scheduler(executor, parse_tree("single", None), Acceptance.MATCH), PARAMS)


def test_a_perfect_drafter_is_perfect_again_after_plain_steps(model_executors):
    """What it missed it has caught up with: otherwise its first chain afterwards would be rejected."""
    executor = model_executors["itself"]
    scheduler = Scheduler(
        executor, parse_tree("chain:3", executor.manifest.head_kind), Acceptance.MATCH, is_adaptive=True
    )
    ladder = scheduler._ladder
    assert ladder is not None
    scheduler.add(Request(request_id=0, prompt_ids=tuple(range(5, 40)), sampling=SamplingParams(max_tokens=60)))
    scheduler.step()
    for is_dear in [True] * 7 + [False] * 3 + [True] * 2 + [False] * 3:
        ladder.times = COMPUTE_BOUND if is_dear else MEMORY_BOUND
        for pulse in ladder.pulses.values():
            pulse.gain, pulse.num_plain = (0.0, 0) if is_dear else (3.0, 0)
        (output,) = scheduler.step()
        assert len(output.token_ids) == (1 if is_dear else 4)


def test_rules_whose_text_depends_on_the_tree_are_refused(tiny_engine):
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    with pytest.raises(ConfigError, match="an adaptive budget needs acceptance match, and this is univer"):
        Scheduler(executor, parse_tree("chain:3", executor.manifest.head_kind), Acceptance.UNIVER, is_adaptive=True)
    with pytest.raises(ConfigError, match="needs a head and a tree"):
        Scheduler(executor, parse_tree("single", None), Acceptance.MATCH, is_adaptive=True)


@pytest.mark.parametrize(
    ("head", "settings", "is_adaptive"),
    [
        ("eagle3", {}, True),
        ("medusa", {"tree": "chain:3"}, True),
        ("eagle3", {"adaptive": False}, False),
        ("eagle3", {"acceptance": Acceptance.UNIVER}, False),
        ("eagle3", {"tree": "single"}, False),
        (None, {}, False),
    ],
)
def test_budgets_adapt_unless_told_otherwise_wherever_the_text_stays_the_same(
    tiny_target, tiny_heads, tmp_path, head, settings, is_adaptive
):
    config = BuildConfig(
        target=tiny_target,
        head=head and tiny_heads[head],
        output=tmp_path / "engine",
        max_context_tokens=400,
        **settings,
    )
    assert build_engine(config).manifest.is_adaptive is is_adaptive


def test_another_rule_for_an_adaptive_engine_drafts_whole_trees(tiny_engine, tmp_path):
    path = tiny_engine("eagle3", adaptive=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    total = compare(CompareConfig(engine=path, prompts=prompts, max_tokens=8, acceptance=Acceptance.UNIVER))
    assert total.num_prompts == 1
    scheduler = Scheduler(TorchExecutor(read_engine(path)), acceptance=Acceptance.UNIVER)
    scheduler.add(Request(request_id=0, prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=4)))
    while scheduler.sequences:
        scheduler.step()


def test_tuning_that_picks_plain_decoding_leaves_an_engine_that_loads(tiny_engine, tmp_path):
    path = tmp_path / "engine"
    shutil.copytree(tiny_engine("eagle3", adaptive=True), path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [5, 6, 7]}\n')
    tuning = tune(TuneConfig(engine=path, prompts=prompts, max_tokens=8, max_depth=2, dry_run=True))
    plain = next(candidate for candidate in tuning.candidates if candidate.family == "plain")
    record(path, read_engine(path).manifest, replace(tuning, chosen=plain))
    assert not read_engine(path).manifest.is_adaptive
    Scheduler(TorchExecutor(read_engine(path)))


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
@pytest.mark.parametrize("max_context_tokens", [16, 40, 130])
def test_the_smallest_engines_measure_within_their_limits_and_serve_a_text_of_full_length(
    tiny_engine, head, max_context_tokens
):
    limits = {"max_context_tokens": max_context_tokens, "max_batch_size": 1, "prefill_chunk_tokens": 16}
    scheduler = Scheduler(TorchExecutor(read_engine(tiny_engine(head, adaptive=True, **limits))))
    sampling = SamplingParams(max_tokens=max_context_tokens - 3)
    scheduler.add(Request(request_id=0, prompt_ids=(5, 6, 7), sampling=sampling))
    tokens = []
    while scheduler.sequences:
        tokens += [token for output in scheduler.step() for token in output.token_ids]
    assert len(tokens) == sampling.max_tokens
