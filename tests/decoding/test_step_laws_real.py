"""20,000 sampled continuations of three tokens of the example model, against its exact law, rule by rule.

A seed's continuations are decided by it alone, so a run either passes always or never; by chance one mode in 1000 would not.
"""

from pathlib import Path

import pytest
import torch
from continuations import Continuations, Sampling, chi_square_p, likely_tokens
from transformers import AutoTokenizer

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor

HEADS = Path(__file__).parents[2] / "examples" / "heads"
TEXT = "Once upon a time, in a small town by the sea, there lived a young woman who"
NUM_ROWS = 500
MODES = [
    ("dynamic:8/2/3", "univer"),
    ("expansion:2,1", "traversal"),
    ("expansion:2,1", "recursive"),
    ("expansion:2,1", "multi_step"),
    ("chain:3", "block"),
    ("dynamic:8/2/3", "match"),
]
SAMPLINGS = [
    Sampling(temperature=0.7, top_k=6, top_p=0.95),
    Sampling(temperature=1.0, top_k=6, top_p=0.9),
]


@pytest.fixture(scope="module")
def executor(example_model, tmp_path_factory) -> TorchExecutor:
    output = tmp_path_factory.mktemp("real") / "engine"
    config = BuildConfig(
        target=example_model, head=HEADS / "eagle3", output=output, dtype=DataType.FLOAT32, max_batch_size=8
    )
    build_engine(config)
    return TorchExecutor(read_engine(output))


@pytest.fixture(scope="module")
def prompt(example_model) -> list[int]:
    """One page of text, and the root."""
    token_ids = AutoTokenizer.from_pretrained(example_model)(TEXT)["input_ids"]
    return token_ids[:17]


def p_of(executor, prompt, mode, sampling, num_samples, vocabulary=None) -> float:
    tree, acceptance = mode
    config = parse_tree(tree, executor.manifest.head_kind)
    continuations = Continuations(executor, (config, Acceptance(acceptance)), prompt, vocabulary)
    num_rows = min(NUM_ROWS, num_samples)
    samples = [continuations.sample(sampling, num_rows, first) for first in range(0, num_samples, num_rows)]
    return chi_square_p(torch.cat(samples), continuations.law(sampling))


def test_some_continuations_of_the_example_model_follow_its_exact_law(executor, prompt):
    """A small one, over the whole vocabulary: eight texts are possible. The slow test below is the thorough one."""
    assert p_of(executor, prompt, MODES[0], Sampling(temperature=1.0, top_k=2, top_p=1.0), 48) > 0.001


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T0.7", "T1.0"])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_20000_continuations_of_the_example_model_follow_its_exact_law(executor, prompt, mode, sampling):
    """The step is shown the 64 likeliest tokens after every text that can begin one, so the law after top-k is the whole's."""
    vocabulary = likely_tokens(executor, prompt, sampling)
    p = p_of(executor, prompt, mode, sampling, 20_000, vocabulary)
    print("-".join(mode), f"temperature {sampling.temperature}: p = {p:.4f}")  # pytest -rP shows it
    assert p > 0.001
