"""Every rule inside the real step: sampled continuations of three tokens follow the target's exact law.

The rules are proved exact by enumeration; these tests hold the drafters to what they state about their draws. A mistake in
one stated law moves the chi-square's p below 1e-6 at this size; by chance p < 0.001 once in 1000 (seeds are fixed).
"""

import pytest
import torch
from continuations import Continuations, Sampling, chi_square_p

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.merged_tree_config import parse_trees
from furcate.decoding.drafters import drawn
from furcate.decoding.draws import Drawn
from furcate.decoding.executors.torch import TorchExecutor

NUM_SAMPLES, NUM_ROWS = 1000, 250
PROMPT = torch.randint(2, 258, (17,), generator=torch.Generator().manual_seed(9)).tolist()
MODES = [
    ("noisy", "chain:3", "block"),
    ("noisy", "choices", "multi_step"),
    ("noisy", "choices", "traversal"),
    ("noisy", "dynamic:9/2/3", "univer"),
    ("eagle3", "dynamic:9/2/3", "univer"),
    ("noisy and eagle3", "expansion:2,1+chain:2", "multi_step"),
]
MORE_MODES = [
    ("noisy", "chain:3", "multi_step"),
    ("noisy", "choices", "recursive"),
    ("noisy", "choices", "univer"),
    ("noisy", "dynamic:9/2/3", "match"),
    ("noisy and eagle3", "chain:3+dynamic:6/1/3", "match"),
    ("medusa", "choices", "traversal"),
    ("hydra", "choices", "recursive"),
]
SAMPLING = Sampling(temperature=1.5, top_k=5, top_p=0.95)


@pytest.fixture(scope="module")
def executors(
    tiny_engine, engine_with, more_heads, model_executors, noisy_target, tiny_heads
) -> dict[str, TorchExecutor]:
    """The noisy draft model is close to the target, so that a wrong law shows; the heads have vocabularies of their own."""
    engines = {head: tiny_engine(head, max_pool_tokens=65536) for head in ("eagle3", "medusa")}
    engines["hydra"] = engine_with(more_heads["hydra"], max_pool_tokens=65536)
    engines["noisy and eagle3"] = engine_with((noisy_target, tiny_heads["eagle3"]), max_pool_tokens=65536)
    return model_executors | {head: TorchExecutor(read_engine(engine)) for head, engine in engines.items()}


@pytest.fixture(scope="module")
def choices(tmp_path_factory) -> str:
    """An uneven tree: siblings of one, two and three, at three depths."""
    path = tmp_path_factory.mktemp("choices") / "uneven.json"
    path.write_text("[[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]]")
    return str(path)


def p_of(executor: TorchExecutor, tree: str, acceptance: str, num_samples: int) -> float:
    config = parse_trees(tree, executor.manifest.heads)
    continuations = Continuations(executor, (config, Acceptance(acceptance)), PROMPT)
    samples = [continuations.sample(SAMPLING, NUM_ROWS, first) for first in range(0, num_samples, NUM_ROWS)]
    return chi_square_p(torch.cat(samples), continuations.law(SAMPLING))


@pytest.mark.parametrize(("head", "tree", "acceptance"), MODES)
def test_continuations_follow_the_targets_exact_law(executors, choices, head, tree, acceptance):
    assert p_of(executors[head], choices if tree == "choices" else tree, acceptance, NUM_SAMPLES) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize(("head", "tree", "acceptance"), MODES + MORE_MODES)
def test_many_continuations_follow_the_targets_exact_law(executors, choices, head, tree, acceptance):
    assert p_of(executors[head], choices if tree == "choices" else tree, acceptance, 16 * NUM_SAMPLES) > 0.001


def test_a_law_that_is_not_what_was_drawn_from_shows(executors, monkeypatch):
    """The size of the test above is enough: a draft sharper than it states is found."""
    honest = drawn.draw_children

    def sharper(law, numbers, kind):
        stated = honest(law, numbers, kind)
        return Drawn(token_ids=honest(law**2, numbers, kind).token_ids, law=stated.law)

    monkeypatch.setattr(drawn, "draw_children", sharper)
    assert p_of(executors["noisy"], "chain:3", "block", NUM_SAMPLES) < 1e-6
