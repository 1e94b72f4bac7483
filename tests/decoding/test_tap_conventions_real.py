"""What EAGLE-3 reads of its target, judged by acceptance on a trained head: both ways of writing the taps are the same head,
and one that is read wrongly is accepted less.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from furcate.builder.build import build_engine
from furcate.builder.checkpoints.heads import read_head
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import Engine, read_engine
from furcate.builder.network.inputs import PassInputs
from furcate.decoding.executors.torch import TorchExecutor

HEAD = Path(__file__).parents[2] / "examples" / "heads" / "eagle3"
TEXTS = {
    "How do I grow tomatoes?": "Growing tomatoes at home is easier than many people think. Start with healthy seedlings and a "
    "sunny place, because tomatoes need at least six hours of direct sunlight every day. Fill a large pot with rich soil and "
    "make sure that the water can drain away. Plant the seedling deep, so that the first leaves are just above the ground. "
    "Water it in the morning, when the soil feels dry, and try not to wet the leaves. After a few weeks, tie the plant to a "
    "stick, so that it does not fall over when the fruit becomes heavy.",
    "Why do ships float?": "Ships float because of a principle that was discovered more than two thousand years ago. When a ship "
    "is placed in the water, it pushes some of the water away. The water pushes back with a force that is equal to the weight of "
    "the water that was pushed away. As long as this force is as large as the weight of the ship, the ship stays at the "
    "surface. This is why a piece of iron sinks, while a large ship made of iron does not: the ship is hollow, and it pushes "
    "away much more water than the iron alone would.",
}

pytestmark = pytest.mark.slow


def with_config(copy: Path, **changes: object) -> Path:
    """A copy of the example head with another config.json."""
    shutil.copytree(HEAD, copy)
    config = json.loads((HEAD / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture(scope="module")
def engines(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """The example head as it was trained, and with a norm before `fc` that it was not trained with."""
    root = tmp_path_factory.mktemp("taps")
    normed = with_config(root / "head", norm_before_fc=True)
    (weights,) = normed.glob("*.safetensors")
    tensors = load_file(weights)
    save_file(tensors | {"input_norm.weight": torch.ones(tensors["fc.weight"].shape[1])}, weights)
    engines = {}
    for name, head in (("plain", HEAD), ("normed", normed)):
        config = BuildConfig(target=example_model, head=head, output=root / name, dtype=DataType.FLOAT32)
        engines[name] = read_engine(build_engine(config).path)
    return engines


@torch.inference_mode()
def acceptance(engine: Engine, taps: tuple[int, ...] | None = None) -> float:
    """The chance that a first draft is accepted at temperature 1, mean over all places of TEXTS: the two laws' overlap.

    `taps` (input-of-layer convention) are read instead of the engine's own.
    """
    head = engine.manifest.head
    assert head is not None
    manifest = replace(engine.manifest, head=replace(head, feature_layers=taps or head.feature_layers))
    executor = TorchExecutor(replace(engine, manifest=manifest))
    tokenizer = AutoTokenizer.from_pretrained(engine.tokenizer_dir)
    overlaps = []
    for question, answer in TEXTS.items():
        turns = [{"role": "user", "content": question}]
        start = len(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])
        turns.append({"role": "assistant", "content": answer})
        tokens = torch.tensor([tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]])
        target = executor.target_pass(chunk_of(tokens, manifest.page_size))
        assert target.features is not None
        hidden = executor.fuse_features(target.features[:, :-1])
        hidden = executor.head_pass(hidden, chunk_of(tokens[:, 1:], manifest.page_size))
        drafted = executor.target_laws(executor.head_logits(hidden).softmax(-1))
        overlap = torch.minimum(target.logits[:, 1:].softmax(-1), drafted).sum(-1)
        overlaps.append(overlap[0, start:])
    return float(torch.cat(overlaps).mean())


def chunk_of(token_ids: torch.Tensor, page_size: int) -> PassInputs:
    """A whole text as one pass."""
    length = token_ids.shape[1]
    return PassInputs(
        token_ids=token_ids,
        positions=torch.arange(length, dtype=torch.int32)[None],
        tree_mask=None,
        cache_lengths=torch.zeros(1, dtype=torch.int32),
        page_table=torch.arange(-(-length // page_size), dtype=torch.int32)[None],
    )


def test_both_conventions_are_the_trained_taps_and_those_off_by_one_are_accepted_less(engines, tmp_path):
    measured = cache(lambda taps: acceptance(engines["plain"], taps))
    trained = measured((2, 15, 27))
    # SafeAILab's layout has no ids; inputs of layers; outputs of layers, which a first id of 1 tells.
    for name, ids in {"none": None, "inputs": [2, 15, 27], "outputs": [1, 14, 26]}.items():
        changes = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
        head = read_head(with_config(tmp_path / name, **changes), target=engines["plain"].manifest.target)
        assert bool(head.warnings) == (name == "outputs"), head.warnings
        assert measured(head.spec.feature_layers) == trained
    wrong = {
        "too low": measured((1, 14, 26)),
        "too high": measured((3, 16, 28)),
        "other order": measured((27, 15, 2)),
    }
    print(f"trained {trained:.4f}", {name: f"{value:.4f}" for name, value in wrong.items()})
    assert trained > max(wrong.values())
    assert wrong["other order"] < 0.5 * trained


def test_a_norm_before_fc_that_the_head_was_not_trained_with_is_accepted_less(engines):
    """As is one that it was trained with, when it is ignored: the taps reach `fc` in another size."""
    plain, normed = acceptance(engines["plain"]), acceptance(engines["normed"])
    print(f"as trained {plain:.4f}, with the norm {normed:.4f}")
    assert normed < 0.8 * plain
