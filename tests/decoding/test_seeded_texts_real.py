"""A seeded text is the same alone and among others, whatever the rule: on the example model, in float32."""

from pathlib import Path

import pytest

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import Engine, read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.prompts import read_prompts
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def engine(example_model, tmp_path_factory) -> Engine:
    output = tmp_path_factory.mktemp("seeded") / "engine"
    head = EXAMPLES / "heads" / "eagle3"
    build_engine(BuildConfig(target=example_model, head=head, output=output, dtype=DataType.FLOAT32))
    return read_engine(output)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [
        ("dynamic:16/4/4", Acceptance.MATCH),
        ("dynamic:16/4/4", Acceptance.UNIVER),
        ("expansion:2,2,1", Acceptance.UNIVER),
        ("expansion:2,2,1", Acceptance.RECURSIVE),
        ("expansion:2,2,1", Acceptance.TRAVERSAL),
        ("expansion:2,2,1", Acceptance.MULTI_STEP),
        ("chain:4", Acceptance.BLOCK),
    ],
)
def test_a_seeded_text_is_the_same_alone_and_among_others(engine, tree, acceptance):
    prompts = read_prompts(EXAMPLES / "prompts.jsonl", engine)[:NUM_PROMPTS]
    scheduler = Scheduler(TorchExecutor(engine), parse_tree(tree, engine.manifest.head_kind), acceptance)

    def texts(*indices: int) -> dict[int, list[int]]:
        for index in indices:
            sampling = SamplingParams(max_tokens=48, temperature=0.9, seed=100 + index)
            scheduler.add(Request(request_id=index, prompt_ids=prompts[index].input_ids, sampling=sampling))
        found: dict[int, list[int]] = {index: [] for index in indices}
        while scheduler.sequences:
            for output in scheduler.step():
                found[output.request_id] += output.token_ids
        return found

    together = texts(*range(NUM_PROMPTS))
    for index in range(NUM_PROMPTS):
        assert texts(index)[index] == together[index]
