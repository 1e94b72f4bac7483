"""Adaptive budgets: the same text, trees only while they pay, and a drafter that catches up."""

import itertools
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig
from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeConfig, TreeKind, parse_tree
from furcate.decoding.compare import CompareConfig, compare
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.pass_times import PassTimes
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.tree_budget import (
    FALL,
    FIRST_GAIN,
    FIRST_PAYMENT,
    LEAST_PAYMENT,
    MOST_DEBT,
    MOST_PAYMENT,
    RISE,
    Luck,
    best_rungs,
    rungs_of,
    smaller_tree,
    step_table,
)
from furcate.decoding.tune import TuneConfig, record, tune

MEMORY_BOUND = PassTimes(verify_ms={1: 20, 4: 21, 16: 24, 64: 30}, draft_ms={0: 1, 1: 1.5, 8: 2})
CPU_LIKE = PassTimes(verify_ms={1: 20, 4: 28, 16: 40, 64: 110}, draft_ms={0: 1.5, 1: 2, 8: 3})
COMPUTE_BOUND = PassTimes(verify_ms={1: 10, 4: 34, 16: 130, 64: 514}, draft_ms={0: 1, 1: 1, 8: 3})
EACH_ITS_OWN = PassTimes(verify_ms={1: 10, 64: 35.2}, draft_ms={0: 0.0, 8: 0.0}, verify_sequence_ms=9.6)
"""Sequences cost, nodes hardly, and passes nothing: each is best off with its own size of tree."""
TREE = TreeConfig(kind=TreeKind.DYNAMIC, budget=16, depth=4, top_k=4)
RUNGS = rungs_of(TREE)


def chosen_for(times: PassTimes, gains: list[float]) -> list[int]:
    return best_rungs(RUNGS, step_table(RUNGS, times, len(gains)), gains)


def lost_share(times: PassTimes, batch: int, num_tokens: int) -> float:
    """The time that a text whose trees are never accepted takes beyond plain decoding, as a share of that."""
    table = step_table(RUNGS, times, batch)
    lucks = [Luck() for _ in range(batch)]
    spent = 0.0
    for _ in range(num_tokens):
        rungs = best_rungs(RUNGS, table, [luck.hoped_gain for luck in lucks])
        spent += sum(table[rung][rungs.count(rung)] for rung in set(rungs))
        for luck, rung in zip(lucks, rungs, strict=True):
            rows = rungs.count(rung)
            if rung == 0:
                luck.learn_plain()
            else:
                luck.learn(0, RUNGS[rung].share, table[rung][rows] / table[0][rows])
    return spent / (num_tokens * table[0][batch]) - 1


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [64, 256, 2048])
@pytest.mark.parametrize(
    "times", [MEMORY_BOUND, CPU_LIKE, COMPUTE_BOUND, EACH_ITS_OWN], ids=["memory", "cpu", "compute", "own"]
)
def test_text_that_is_never_predicted_costs_at_most_a_twentieth_more(times, batch, num_tokens):
    assert lost_share(times, batch, num_tokens) <= (0.05 if num_tokens == 64 else 0.03)


def test_what_is_accepted_often_gets_the_whole_tree_and_hope_returns_when_the_debt_is_paid():
    lucky, unlucky = Luck(gain=3.5), Luck(gain=0.0, debt=0.1, num_plain=1, payment=0.02)
    assert chosen_for(MEMORY_BOUND, [lucky.hoped_gain]) == [2]
    assert chosen_for(MEMORY_BOUND, [unlucky.hoped_gain]) == [0]
    num_steps = 0
    while unlucky.debt > 0:
        assert unlucky.hoped_gain == 0.0
        unlucky.learn_plain()
        num_steps += 1
    assert num_steps in (5, 6)
    assert unlucky.hoped_gain == FIRST_GAIN
    assert chosen_for(MEMORY_BOUND, [unlucky.hoped_gain])[0] > 0


def test_tries_come_sooner_where_they_are_worth_it_and_later_where_not():
    luck = Luck()
    for number in range(20):
        luck.learn(number % 2, 1.0, cost=1.2)
    assert luck.payment == FIRST_PAYMENT, "trees that follow trees are no tries"

    def tries(*accepted):
        for count in accepted:
            luck.learn_plain()
            luck.learn(count, 1.0, cost=1.2)

    tries(*[0] * 20)
    assert luck.payment == LEAST_PAYMENT
    tries(*[1, 0] * 30)
    assert luck.payment >= MOST_PAYMENT * FALL
    tries(*[1, 0, 0, 0, 0] * 40)
    assert luck.payment <= LEAST_PAYMENT * RISE


def test_a_debt_is_what_trees_lost_and_is_bounded():
    luck = Luck()
    luck.learn(2, 1.0, cost=1.5)
    assert luck.debt == 0
    luck.learn(0, 1.0, cost=1.5)
    assert luck.debt == 0.5
    for _ in range(5):
        luck.learn(0, 1.0, cost=1.5)
    assert luck.debt == MOST_DEBT


def test_a_large_batch_wants_smaller_trees():
    chosen = [chosen_for(CPU_LIKE, [3.5] * batch) for batch in (1, 4, 32)]
    assert all(len(set(rungs)) == 1 for rungs in chosen)
    firsts = [rungs[0] for rungs in chosen]
    assert firsts == sorted(firsts, reverse=True)
    assert firsts[0] > firsts[-1]


def test_where_each_sequence_has_its_own_cost_nodes_are_cheaper_than_steps():
    own_costs = replace(CPU_LIKE, verify_sequence_ms=5.0, draft_sequence_ms=0.1)
    assert chosen_for(CPU_LIKE, [2.0] * 32) == [0] * 32
    assert chosen_for(own_costs, [2.0] * 32) == [1] * 32
    assert own_costs.verify(32, 32) == CPU_LIKE.verify(32) + 31 * 5.0


def test_each_sequence_of_a_batch_gets_the_tree_that_its_own_luck_deserves():
    assert chosen_for(EACH_ITS_OWN, [4.0, 0.0, 1.0, 0.0, 4.0]) == [2, 0, 1, 0, 2]
    # A second pass would cost more than it brings: all share one.
    assert len(set(chosen_for(MEMORY_BOUND, [4.0, 0.0, 1.0, 0.0, 4.0]))) == 1


@settings(max_examples=60, deadline=None)
@given(gains=st.lists(st.floats(0, 6), min_size=1, max_size=6), which=st.integers(0, 3))
def test_no_other_choice_of_trees_promises_more_tokens_a_second(gains, which):
    times = (MEMORY_BOUND, CPU_LIKE, COMPUTE_BOUND, EACH_ITS_OWN)[which]
    table = step_table(RUNGS, times, len(gains))

    def speed(rungs):
        tokens = sum(RUNGS[rung].tokens(gain) for rung, gain in zip(rungs, gains, strict=True))
        return tokens / sum(table[rung][rungs.count(rung)] for rung in set(rungs))

    best = max(speed(rungs) for rungs in itertools.product(range(3), repeat=len(gains)))
    assert speed(tuple(chosen_for(times, gains))) == pytest.approx(best)


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
            # Trees too dear to be used, then cheap, then to each his own: every change of step is passed.
            manner = step // 5 % 3
            scheduler._ladder.reckon_with((COMPUTE_BOUND, MEMORY_BOUND, EACH_ITS_OWN)[manner])
            for request_id, luck in scheduler._ladder.lucks.items():
                luck.gain = (0.0, 3.0, (0.0, 1.0, 4.0)[(request_id + step) % 3])[manner]
                luck.num_plain = 0
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
        step += 1
    assert scheduler.num_allocated_pages == 0
    assert not scheduler._ladder or not (scheduler._ladder.lucks or scheduler._ladder.unseen)
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


def test_the_sequences_of_one_step_draft_trees_of_their_own_sizes(tiny_engine):
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    tree = parse_tree("dynamic:12/2/3", executor.manifest.head_kind)
    scheduler = Scheduler(executor, tree, Acceptance.MATCH, is_adaptive=True)
    ladder = scheduler._ladder
    assert ladder is not None
    ladder.reckon_with(EACH_ITS_OWN)
    for index in range(4):
        scheduler.add(Request(request_id=index, prompt_ids=(5, 6, 7 + index), sampling=SamplingParams(max_tokens=20)))
    while not all(sequence.is_prefilled for sequence in scheduler.sequences.values()):
        scheduler.step()
    gains = {0: 0.0, 1: 4.0, 2: 1.0, 3: 4.0}
    ladder.lucks = {index: Luck(gain=gain) for index, gain in gains.items()}
    before = {index: sequence.stats.num_draft_tokens for index, sequence in scheduler.sequences.items()}
    scheduler.step()
    drafted = {i: s.stats.num_draft_tokens - before[i] for i, s in scheduler.sequences.items()}
    assert drafted == {0: 0, 1: 11, 2: 5, 3: 11}


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
        ladder.reckon_with(COMPUTE_BOUND if is_dear else MEMORY_BOUND)
        for luck in ladder.lucks.values():
            luck.gain, luck.debt = (0.0, 1.0) if is_dear else (3.0, 0.0)
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
