"""What tuning predicts of trees is what they give: on the example model, within 5% (Sequoia's own claim is held to 10%)."""

from pathlib import Path

import pytest

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.prompts import read_prompts
from furcate.decoding.tune import TuneConfig, predict, run_candidates

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_predicted_tau_is_what_trees_give_on_the_example_model(example_model, tmp_path, head):
    engine = build_engine(
        BuildConfig(
            target=example_model, head=EXAMPLES / "heads" / head, output=tmp_path / "engine", dtype=DataType.FLOAT32
        )
    )
    # In float32 prediction and measurement are of the same texts: what parts them is where the texts' ends cut steps short.
    config = TuneConfig(engine=engine.path, prompts=EXAMPLES / "prompts.jsonl", limit=8, max_tokens=64)
    read = read_engine(engine.path)
    executor = TorchExecutor(read)
    prompts = read_prompts(config.prompts, read)[: config.limit]
    candidates, _, rates = predict(config, executor, prompts)
    members = {
        family: [candidate for candidate in candidates if candidate.family == family]
        for family in ("plain", "chain", "sequoia", "dynamic")
    }
    smallest, largest = members["sequoia"][0], members["sequoia"][-1]
    chosen = [*members["plain"], smallest, largest, members["chain"][-1], members["dynamic"][-1]]
    run = run_candidates(config, executor, prompts, chosen)[1:]
    assert len(rates) > 1
    for candidate in run:
        print(candidate.tree, f"predicted {candidate.predicted_tau:.3f}, measured {candidate.measured_tau:.3f}")
    for candidate in run:
        assert candidate.measured_tau == pytest.approx(candidate.predicted_tau, rel=0.05)
    assert largest.predicted_tau > smallest.predicted_tau + 0.2
