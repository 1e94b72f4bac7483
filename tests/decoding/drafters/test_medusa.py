"""Medusa heads on Qwen targets, greedy and sampled: what plain decoding says, in fewer steps.

A random target has no trained heads, so each head here is the least-squares solution for the texts of this file: more
dimensions than tokens, so it knows them by heart, and drafts really are accepted.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, RequestStats, SamplingParams
from furcate.decoding.scheduler import Scheduler

HIDDEN, VOCAB, NUM_HEADS, NUM_TOKENS = 192, 300, 3, 24
PROMPT = tuple(range(40, 60))
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # Larger than the default 0.02, so that next tokens depend on the whole context.
    "initializer_range": 0.15,
}
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=32)),
}
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS),
    "temperature": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, seed=11),
    "top-k": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, top_k=3, seed=11),
    "top-p": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.5, top_p=0.5, seed=11),
    "both": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.2, top_k=4, top_p=0.6, seed=12),
}


@dataclass(frozen=True)
class Family:
    """A random Qwen, its plain texts, and its engine with heads that know them."""

    model: PreTrainedModel
    texts: dict[str, tuple[int, ...]]
    executor: TorchExecutor


def run(executor: TorchExecutor, tree: str, names: list[str]) -> tuple[dict[str, tuple[int, ...]], list[RequestStats]]:
    """The texts of these samplings, run together, and their last counts."""
    head = executor.head
    config = parse_tree(tree, head.kind if head else None, head.num_heads if head else 0)
    scheduler = Scheduler(executor, config)
    for index, name in enumerate(names):
        scheduler.add(Request(request_id=index, prompt_ids=PROMPT, sampling=SAMPLINGS[name]))
    texts: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    stats = {}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[names[output.request_id]] += output.token_ids
            stats[output.request_id] = output.stats
    return texts, [stats[index] for index in range(len(names))]


def write_heads(path: Path, model: PreTrainedModel, texts: list[tuple[int, ...]]) -> Path:
    """Medusa v0.1 heads: blocks that add nothing, and vocabulary heads solved for these texts."""
    states: list[Tensor] = []
    ahead: list[list[int]] = []
    for text in texts:
        tokens = [*PROMPT, *text]
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0].double()
        for place in range(len(PROMPT) - 1, len(tokens) - 1 - NUM_HEADS):
            states.append(hidden[place])
            ahead.append(tokens[place + 2 : place + 2 + NUM_HEADS])
    inverse = torch.linalg.pinv(torch.stack(states))
    tensors = {}
    for head, wanted in enumerate(torch.tensor(ahead).T):
        solved = inverse @ torch.nn.functional.one_hot(wanted, VOCAB).double()
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = solved.T.float().contiguous()
    path.mkdir()
    save_file(tensors, path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(f'{{"medusa_num_heads": {NUM_HEADS}, "medusa_num_layers": 1}}')
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp(request.param)
    model_type, config = FAMILIES[request.param]
    torch.manual_seed(3)
    model = model_type(config).eval()
    model.save_pretrained(root / "target")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target / file, root / "target")

    def executor(head: Path | None, name: str) -> TorchExecutor:
        sizes = {"dtype": DataType.FLOAT32, "max_context_tokens": 200}
        build_engine(BuildConfig(target=root / "target", head=head, output=root / name, **sizes))
        return TorchExecutor(read_engine(root / name))

    with torch.inference_mode():
        plain = executor(None, "plain")
        texts = {name: run(plain, "single", [name])[0][name] for name in SAMPLINGS}
        heads = write_heads(root / "heads", model, list(texts.values()))
        return Family(model, texts, executor(heads, "engine"))


@torch.inference_mode()
def test_plain_greedy_text_is_transformers(family: Family) -> None:
    tokens = [*PROMPT]
    for _ in range(NUM_TOKENS):
        tokens.append(int(family.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert family.texts["greedy"] == tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize("tree", ["chain:3", "expansion:3,2,1", "dynamic:12/2/3"])
def test_texts_at_any_temperature_are_plain_decodings_in_fewer_steps(family: Family, tree: str) -> None:
    assert family.executor.head is not None and family.executor.head.kind is HeadKind.MEDUSA
    texts, stats = run(family.executor, tree, list(SAMPLINGS))
    assert texts == family.texts
    for request in stats:
        assert request.is_lossless
        assert request.tau is not None
        assert request.tau > 2.0


@pytest.mark.parametrize("name", ["top-k", "top-p", "both"])
@torch.inference_mode()
def test_sampled_texts_stay_within_top_k_and_top_p(family: Family, name: str) -> None:
    """By transformers' own warpers; without the limits the same seed leaves them."""
    free = replace(SAMPLINGS[name], top_k=None, top_p=None)
    limited, _ = run(family.executor, "chain:3", [name])
    assert num_outside(family.model, limited[name], SAMPLINGS[name]) == 0
    scheduler = Scheduler(family.executor, parse_tree("chain:3", HeadKind.MEDUSA, NUM_HEADS))
    scheduler.add(Request(request_id=0, prompt_ids=PROMPT, sampling=free))
    text: tuple[int, ...] = ()
    while scheduler.sequences:
        text += scheduler.step()[0].token_ids
    assert num_outside(family.model, text, SAMPLINGS[name]) > 0


def num_outside(model: PreTrainedModel, text: tuple[int, ...], sampling: SamplingParams) -> int:
    """Tokens of the text that transformers' warpers would not allow at their places."""
    tokens = torch.tensor([[*PROMPT, *text]])
    logits = TemperatureLogitsWarper(sampling.temperature)(tokens, model(tokens).logits[0, len(PROMPT) - 1 : -1])
    if sampling.top_k is not None:
        logits = TopKLogitsWarper(sampling.top_k)(tokens, logits)
    if sampling.top_p is not None:
        logits = TopPLogitsWarper(sampling.top_p)(tokens, logits)
    return int(logits.gather(1, torch.tensor(text)[:, None]).isinf().sum())
