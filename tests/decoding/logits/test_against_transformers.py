"""Plain greedy texts and sampling laws equal transformers' own processors on the same weights."""

import pytest
import torch
from transformers import LlamaForCausalLM, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.sampling import SamplingRows, target_law
from furcate.decoding.scheduler import Scheduler

BANNED = [[token] for token in range(2, 200, 4)] + [[a, b] for a in range(3, 250, 4) for b in range(5, 250, 4)]
CASES = {
    "repetition": ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
    "encouraged": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "bad words": ({"bad_sequences": tuple(map(tuple, BANNED))}, {"bad_words_ids": BANNED}),
    "bias": (
        {"embedding_bias": ((70, 6.0), (80, 5.5), (90, -30.0))},
        {"sequence_bias": [[[70], 6.0], [[80], 5.5], [[90], -30.0]]},
    ),
    "min_tokens": (
        {"min_tokens": 7, "embedding_bias": ((1, 40.0),)},
        {"min_new_tokens": 7, "sequence_bias": [[[1], 40.0]]},
    ),
    "combined": (
        {
            "repetition_penalty": 1.4,
            "bad_sequences": tuple(map(tuple, BANNED)),
            "embedding_bias": ((71, 6.0), (83, 6.0)),
        },
        {"repetition_penalty": 1.4, "bad_words_ids": BANNED, "sequence_bias": [[[71], 6.0], [[83], 6.0]]},
    ),
}


@pytest.fixture(scope="module")
def model(tiny_target) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_equals_transformers_generate(model, tiny_engine, name):
    ours, theirs = CASES[name]
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    scheduler = Scheduler(executor, parse_tree("single", executor.head.kind, 0))
    prompts = [(5, 6, 7, 70), tuple(range(40, 80))]
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=30, end_ids=(1,), **ours)
        scheduler.add(Request(request_id=index, prompt_ids=prompt, sampling=sampling))
    texts = {0: (), 1: ()}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
    for index, prompt in enumerate(prompts):
        input_ids = torch.tensor([prompt])
        generated = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=1,
            **theirs,
        )
        assert tuple(generated[0, len(prompt) :].tolist()) == texts[index]


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (20, None), (None, 0.9), (30, 0.7)])
def test_law_equals_the_warpers_in_transformers_order(min_p, top_k, top_p):
    vocab_size, temperature = 200, 0.8
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    rows = SamplingRows(
        temperature=torch.full((4,), temperature),
        top_k=torch.full((4,), top_k or vocab_size),
        top_p=torch.full((4,), top_p or 1.0),
        seeds=torch.zeros(4, dtype=torch.int64),
        is_greedy=False,
        largest_top_k=top_k,
        uses_top_p=top_p is not None,
        min_p=torch.full((4,), min_p) if min_p else None,
    )
    scores = logits / temperature
    empty = torch.zeros(4, 0, dtype=torch.int64)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(empty, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(empty, scores)
    scores = MinPLogitsWarper(min_p)(empty, scores)
    # Renormalising after each cut or once at the end: float32 rounding.
    torch.testing.assert_close(target_law(logits, rows), scores.softmax(-1), atol=1e-6, rtol=1e-5)
