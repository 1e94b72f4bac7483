"""Several heads on one engine: their trees are merged, the text is the target's, and what cannot be merged is refused."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from continuations import Continuations, Sampling
from exact_laws import all_branches, tree_rows
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.cli import main
from furcate.builder.config import BuildConfig, Executor
from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError
from furcate.builder.inspect import description
from furcate.builder.merged_tree_config import parse_trees
from furcate.builder.tree_config import parse_tree, tree_config_from_json
from furcate.decoding import draws
from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.drafters.laws import node_laws
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.explain import ExplainConfig, explanation_of
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.step import Step, StepRows
from furcate.decoding.tree import DraftKind

PAIRS = {
    "eagle3 and medusa": ["chain:3", "dynamic:8/2/3", "chain:5+dynamic:10/2/4", "expansion:2,1"],
    "noisy and eagle3": ["chain:4", "dynamic:8/2/3+chain:2"],
    "itself and noisy": ["chain:3+chain:5"],
}
PROMPTS = [tuple(5 + place % 250 for place in range(length)) for length in (1, 37, 16, 300)]


@pytest.fixture(scope="module")
def executors(engine_with, tiny_target, tiny_heads, noisy_target) -> dict[str, TorchExecutor]:
    heads = tiny_heads | {"noisy": noisy_target, "itself": tiny_target}
    return {
        name: TorchExecutor(read_engine(engine_with(tuple(heads[part] for part in name.split(" and ")))))
        for name in PAIRS
    }


def run_all(scheduler: Scheduler, params: list[SamplingParams], prompts=PROMPTS) -> tuple[dict, dict]:
    """Texts and counts of a batch."""
    for index, sampling in enumerate(params):
        scheduler.add(Request(request_id=index, prompt_ids=prompts[index], sampling=sampling))
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(params)), ())
    stats = {}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
            stats[output.request_id] = output.stats
    assert scheduler.num_allocated_pages == 0
    return texts, stats


PARAMS = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=4),
    SamplingParams(max_tokens=24),
]


@pytest.mark.parametrize(("pair", "tree"), [(pair, tree) for pair, trees in PAIRS.items() for tree in trees])
def test_a_batch_of_greedy_and_seeded_texts_is_plain_decodings(executors, pair, tree):
    executor = executors[pair]
    merged = parse_trees(tree, executor.manifest.heads)
    texts, stats = run_all(Scheduler(executor, merged), PARAMS)
    plain = parse_tree("single", None)
    assert texts == run_all(Scheduler(executor, plain), PARAMS)[0]
    assert all(entry.num_draft_tokens > 0 for entry in stats.values())
    if pair.startswith("itself"):
        # One drafter is the target: greedy texts are accepted at full depth, but for the last step's cut.
        assert stats[0].tau > 3.2


def test_the_heads_of_an_engine_are_what_each_is_alone(executors, tiny_engine):
    """The second head drafts from its own features, pool and vocabulary: its tree is that of an engine with it alone."""
    both, alone = executors["eagle3 and medusa"], TorchExecutor(read_engine(tiny_engine("medusa")))
    trees = {}
    for name, executor, tree in (("both", both, "chain:1+chain:3"), ("alone", alone, "chain:3")):
        scheduler = Scheduler(executor, parse_trees(tree, executor.manifest.heads))
        seen = trees[name] = []
        scheduler._step.on_step = lambda trace, seen=seen: seen.append(paths_of(trace.tree))
        run_all(scheduler, [SamplingParams(max_tokens=2)], PROMPTS[1:2])
    assert trees["alone"][0] <= trees["both"][0]
    assert len(trees["both"][0]) <= len(trees["alone"][0]) + 1


def paths_of(tree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    token_ids, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    for node in range(1, int(tree.num_nodes[0])):
        paths.append((*paths[parents[node]], token_ids[node]))
    return set(paths)


TWO_TOKENS = Sampling(temperature=1.5, top_k=2, top_p=1.0)
"""So that all draws can be listed."""


class ListedDraws:
    """Draws that follow a list of choices, one column a call, and keep each row's probability."""

    def __init__(self, choices: Tensor) -> None:
        self.choices, self.num_calls = choices, 0
        self.weights = torch.ones(len(choices), dtype=torch.float64)

    def __call__(self, law: Tensor, u: Tensor) -> Tensor:
        probs, tokens = law.double().sort(dim=1, descending=True)
        chosen = self.choices[:, self.num_calls : self.num_calls + 1]
        self.num_calls += 1
        self.weights = self.weights * (probs / probs.sum(1, keepdim=True)).gather(1, chosen).squeeze(1)
        return tokens.gather(1, chosen).squeeze(1)


@pytest.mark.parametrize("pair", ["noisy and eagle3", "itself and noisy"])
def test_all_draws_of_two_drafters_together_give_the_targets_law(executors, pair, monkeypatch):
    """Every tree that the engine's own heads can draw, times every branch of the rule: the law of the next two tokens."""
    executor = executors[pair]
    trees = parse_trees("chain:2", executor.manifest.heads)
    continuations = Continuations(executor, (trees, Acceptance.MULTI_STEP), list(range(5, 22)))
    choices = ListedDraws(torch.tensor(list(product((0, 1), repeat=4))))
    monkeypatch.setattr(draws, "draw", choices)
    traces = []
    continuations.step.on_step = traces.append
    sampling = TWO_TOKENS.rows(torch.zeros(len(choices.weights), dtype=torch.int64))
    rows = continuations.first_rows(len(choices.weights))
    continuations.step.run(StepRows(draft=rows, sampling=sampling))
    assert choices.num_calls == 4
    (trace,) = traces
    assert trace.tree.kind is DraftKind.WITH_REPLACEMENT
    laws = node_laws(trace.logits, sampling).double()
    laws = laws / laws.sum(-1, keepdim=True)
    sources, accepted, chances = all_branches(
        lambda sources: (tree_rows(trace.tree, sources), laws[sources]),
        len(choices.weights),
        RULES["multi_step"].accept,
    )
    tokens = trace.tree.token_ids[sources].gather(1, accepted.path_nodes).roll(-1, 1)
    tokens = tokens.scatter(1, accepted.num_accepted[:, None] - 1, accepted.bonus[:, None])
    found: Counter[tuple[int, ...]] = Counter()
    for text, count, chance in zip(
        tokens.tolist(), accepted.num_accepted.tolist(), (choices.weights[sources] * chances).tolist(), strict=True
    ):
        found[tuple(text[: min(count, 2)])] += chance
    expected: Counter[tuple[int, ...]] = Counter()
    for path, chance in continuations.law(TWO_TOKENS).items():
        expected[path[:2]] += chance
    firsts = {path[0]: sum(p for other, p in expected.items() if other[0] == path[0]) for path in expected}
    for path, chance in expected.items():
        # Where a step ends after one token, the second is the target's.
        law = found[path] + found[path[:1]] * chance / firsts[path[0]]
        # float32 logits of passes of different shapes differ by about 1e-6 of their size; a wrong law by 1e-4 and more.
        assert law == pytest.approx(chance, abs=1e-5)
    assert {path[:1] for path in found} == {(first,) for first in firsts}


def test_drafters_do_not_share_random_numbers(engine_with, noisy_target):
    """Two equal drafters with the same numbers would always draw the same path, which biases what comes out."""
    executor = TorchExecutor(read_engine(engine_with((noisy_target, noisy_target))))
    step = Step(executor, parse_trees("chain:2", executor.manifest.heads), Acceptance.MULTI_STEP)
    sizes = []
    step.on_step = lambda trace: sizes.append(int(trace.tree.num_nodes[0]))
    scheduler = Scheduler(executor, parse_tree("single", None))
    scheduler._step = step
    run_all(scheduler, [SamplingParams(max_tokens=40, temperature=1.5, top_k=2, seed=1)])
    assert set(sizes) == {3, 4, 5}


def test_trees_are_one_for_all_heads_or_one_each(executors):
    heads = executors["eagle3 and medusa"].manifest.heads
    tree = parse_trees("chain:4+dynamic:8/2/3", heads)
    assert str(tree) == "chain:4+dynamic:8/2/3"
    assert (tree.budget, tree.max_depth) == (12, 4)
    assert tree_config_from_json(tree.to_json()) == tree
    assert [str(part) for part in parse_trees("chain:2", heads).parts] == ["chain:2", "chain:2"]
    assert parse_trees("auto", heads).budget == 15
    for text, sentence in {
        "chain:2+chain:2+chain:2": "is for 3 heads, and there are 2",
        "chain:2+single": "leaves a head without a tree",
        "chain:2+chain:5": "the head has 3 heads",
        "dynamic:100/6/10+dynamic:40/2/6": "at most 128",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            parse_trees(text, heads)


def test_an_engine_says_what_its_heads_are(executors):
    manifest = executors["eagle3 and medusa"].manifest
    rows = description(manifest)
    assert "eagle3" in rows["head"]
    assert "medusa" in rows["head2"]
    parts = [replace(manifest, head=head, more_heads=()) for head in manifest.heads]
    plain = replace(manifest, head=None, more_heads=()).kv_bytes_per_token()
    assert manifest.kv_bytes_per_token() == sum(part.kv_bytes_per_token() - plain for part in parts) + plain
    assert manifest.feature_layers == sum((part.feature_layers for part in parts), ())


def test_the_command_takes_a_head_again_and_again(tiny_target, tiny_heads, tmp_path, monkeypatch, capsys):
    heads = [word for name in ("medusa", "eagle") for word in ("--head", str(tiny_heads[name]))]
    options = ["--target", str(tiny_target), "--output", str(tmp_path / "engine"), "--tree", "chain:2"]
    monkeypatch.setattr("sys.argv", ["build_engine", *options, *heads])
    main()
    manifest = read_engine(tmp_path / "engine").manifest
    assert [head.kind.value for head in manifest.heads] == ["medusa", "eagle"]
    assert str(manifest.tree) == "chain:2+chain:2"
    printed = " ".join(capsys.readouterr().out.split())
    assert "medusa from" in printed
    assert "eagle from" in printed


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"acceptance": Acceptance.TRAVERSAL, "tree": "chain:2"}, "does not go with several heads"),
        ({"acceptance": Acceptance.UNIVER}, "does not go with several heads"),
        ({"acceptance": Acceptance.MULTI_STEP, "tree": "chain:2+dynamic:8/2/3"}, "does not go with tree"),
        ({"executor": Executor.TENSORRT}, "--executor tensorrt takes one"),
    ],
)
def test_what_several_heads_cannot_do_is_refused_at_the_build(tiny_target, tiny_heads, tmp_path, settings, sentence):
    heads = (tiny_heads["eagle3"], tiny_heads["medusa"])
    with pytest.raises(ConfigError, match=sentence):
        build_engine(BuildConfig(target=tiny_target, head=heads, output=tmp_path / "engine", **settings))
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    "options",
    [{"tree": "chain:3+dynamic:8/2/3"}, {"tree": "chain:2", "temperature": 1.0, "acceptance": Acceptance.MULTI_STEP}],
    ids=["matched", "drawn"],
)
def test_explain_tells_of_every_node_whichever_head_drafted_it(engine_with, tiny_heads, options):
    path = engine_with((tiny_heads["eagle3"], tiny_heads["medusa"]))
    config = ExplainConfig(engine=path, prompt="a<b & c", max_tokens=16, **options)
    explanation = explanation_of(read_engine(path), config)
    assert sum(explanation.misses.values()) == len(explanation.steps) > 0
    nodes = [node for step in explanation.steps for node in step.nodes[1:]]
    assert all(node.draft_prob is not None and 0 < node.draft_prob <= 1 for node in nodes)
    # Both heads' nodes are there: more than one head's tree has.
    assert max(len(step.nodes) for step in explanation.steps) > 4
