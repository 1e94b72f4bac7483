"""Every rule inside the real step: sampled continuations of three tokens follow the target's exact law.

The rules are proved exact by enumeration; these tests hold the drafters to what they state about their draws. A mistake in
one stated law moves the chi-square's p below 1e-6 at this size; by chance p < 0.001 once in 1000 (seeds are fixed).
"""

import pytest
import torch
from continuations import Continuations, Sampling, chi_square_p

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor

NUM_SAMPLES, NUM_ROWS = 2000, 250
PROMPT = torch.randint(2, 258, (17,), generator=torch.Generator().manual_seed(9)).tolist()
MODES = [
    ("eagle3", "chain:3", "block"),
    ("eagle3", "chain:3", "multi_step"),
    ("eagle3", "choices", "multi_step"),
    ("eagle3", "choices", "recursive"),
    ("eagle", "choices", "traversal"),
    ("medusa", "choices", "traversal"),
    ("eagle3", "choices", "univer"),
    ("eagle3", "dynamic:12/2/3", "univer"),
    ("medusa", "dynamic:9/1/3", "univer"),
    ("eagle3", "dynamic:12/2/3", "match"),
]
SAMPLING = Sampling(temperature=1.5, top_k=5, top_p=0.95)


@pytest.fixture(scope="module")
def executors(tiny_engine) -> dict[str, TorchExecutor]:
    return {
        head: TorchExecutor(read_engine(tiny_engine(head, max_pool_tokens=65536)))
        for head in ("eagle3", "eagle", "medusa")
    }


@pytest.fixture(scope="module")
def choices(tmp_path_factory) -> str:
    """An uneven tree: siblings of one, two and three, at three depths."""
    path = tmp_path_factory.mktemp("choices") / "uneven.json"
    path.write_text("[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]")
    return str(path)


@pytest.mark.parametrize(("head", "tree", "acceptance"), MODES)
def test_continuations_follow_the_targets_exact_law(executors, choices, head, tree, acceptance):
    executor = executors[head]
    kind = executor.manifest.head_kind
    config = parse_tree(choices if tree == "choices" else tree, kind, num_heads=3)
    continuations = Continuations(executor, config, Acceptance(acceptance), PROMPT)
    samples = [continuations.sample(SAMPLING, NUM_ROWS, first) for first in range(0, NUM_SAMPLES, NUM_ROWS)]
    assert chi_square_p(torch.cat(samples), continuations.law(SAMPLING)) > 0.001
