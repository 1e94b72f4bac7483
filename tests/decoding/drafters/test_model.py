"""A whole model as the drafter: its cache follows the target's, and what it may not be is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

PROMPTS = [tuple(range(5, 5 + length)) for length in (1, 37, 16)]


def texts_of(executor: TorchExecutor, tree: str) -> tuple[dict[int, tuple[int, ...]], list[float]]:
    """Greedy texts of a batch, and each request's tokens a step."""
    scheduler = Scheduler(executor, parse_tree(tree, HeadKind.MODEL))
    for index, prompt in enumerate(PROMPTS):
        scheduler.add(Request(request_id=index, prompt_ids=prompt, sampling=SamplingParams(max_tokens=26 + 5 * index)))
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(PROMPTS)), ())
    stats = {}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
            stats[output.request_id] = output.stats
        assert scheduler.num_allocated_pages == scheduler.num_committed_pages
    return texts, [stats[index].tau or 0.0 for index in texts]


@pytest.mark.parametrize("tree", ["chain:4", "chain:1", "mc_sim_7b_63", "dynamic:12/3/3"])
@pytest.mark.parametrize("drafter", ["itself", "noisy"])
def test_greedy_text_is_plain_decodings_and_a_perfect_drafter_is_always_accepted(model_executors, drafter, tree):
    executor = model_executors[drafter]
    texts, taus = texts_of(executor, tree)
    assert texts == texts_of(executor, "single")[0]
    depth = parse_tree(tree, HeadKind.MODEL).max_depth
    if drafter == "itself" and tree.startswith("dynamic"):
        # A tree of the most probable paths may leave out the greedy one.
        assert all(tau > 2 for tau in taus)
    elif drafter == "itself":
        # Text after text at full depth, but for the last step's cut: a stale row in the drafter's cache would end that.
        assert all(tau > depth + 1 - (depth + 1) ** 2 / 26 for tau in taus)
    else:
        assert all(1 <= tau <= depth + 1 for tau in taus)


def test_a_furcate_engine_drafts_as_its_checkpoint_does(model_executors, tiny_target, tmp_path):
    engine = build_engine(BuildConfig(target=tiny_target, output=tmp_path / "draft", dtype=DataType.FLOAT32)).path
    config = BuildConfig(
        target=tiny_target, head=engine, output=tmp_path / "both", dtype=DataType.FLOAT32, max_context_tokens=400
    )
    result = build_engine(config)
    assert result.manifest.head_kind is HeadKind.MODEL
    assert result.warnings == ()
    executor = TorchExecutor(read_engine(result.path))
    assert texts_of(executor, "chain:4") == texts_of(model_executors["itself"], "chain:4")


def test_another_vocabulary_is_refused(tiny_target, tmp_path):
    other = shutil.copytree(tiny_target, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        CheckpointError, match=r"has another tokenizer than the target \(token '[ab]' is not \d+ there\)"
    ):
        build_engine(BuildConfig(target=tiny_target, head=other, output=tmp_path / "engine"))

    smaller = shutil.copytree(tiny_target, tmp_path / "smaller")
    config = json.loads((smaller / "config.json").read_text()) | {"vocab_size": 280}
    (smaller / "config.json").write_text(json.dumps(config))
    weights = load_file(smaller / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:280].clone()
    save_file(weights, smaller / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="has a vocabulary of 280 and the target one of 300"):
        build_engine(BuildConfig(target=tiny_target, head=smaller, output=tmp_path / "engine"))


def test_a_model_without_a_tokenizer_is_taken_with_a_warning(noisy_target, tiny_target, tmp_path):
    config = BuildConfig(target=tiny_target, head=noisy_target, output=tmp_path / "engine", dtype=DataType.FLOAT32)
    (warning,) = build_engine(config).warnings
    assert "only the vocabularies' sizes were checked" in warning
    assert torch.isfinite(TorchExecutor(read_engine(tmp_path / "engine")).target_pool).all()
