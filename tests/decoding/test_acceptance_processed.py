"""Penalties, bans, bias, minimal lengths and guides: every lossless rule gives the law of plain decoding that has them too.

By enumeration of all trees and all branches, as in test_acceptance_laws.py; the nodes' laws come from the processing that serves
requests, the expected ones from plain definitions, context by context. The processing works in float32: 1e-6 of a probability.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import plain_logits
import pytest
import torch
from exact_laws import Drafts, draw_all, exact_law
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_models import Context, Pair
from transformers import PreTrainedTokenizerFast

from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.logits.guide import GuideCompiler, TextGuide
from furcate.decoding.logits.processing import processing_of, text_logits_of
from furcate.decoding.request import Guide, GuideKind, Request, SamplingParams
from furcate.decoding.tree import DraftKind
from furcate.decoding.tree_shape import chain_shape, expansion_shape, shape_from_choices

CPU = torch.device("cpu")
PROMPT = (2, 1)
ROOT, END = 0, 3
RULE_KINDS = [
    ("match", DraftKind.DETERMINISTIC),
    ("multi_step", DraftKind.WITH_REPLACEMENT),
    ("recursive", DraftKind.WITHOUT_REPLACEMENT),
    ("traversal", DraftKind.WITHOUT_REPLACEMENT),
    ("block", DraftKind.WITH_REPLACEMENT),
    ("univer", DraftKind.MIXED),
    ("univer", DraftKind.DETERMINISTIC),
]
SHAPES = [expansion_shape([2, 1]), shape_from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])]
PARAMS = {
    "penalties": {"repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "bad words": {"bad_sequences": ((1,), (2, 3), (0, 0), (3, 3, 2))},
    "bias": {"embedding_bias": ((1, 1.5), (2, -2.0))},
    "min_tokens": {"min_tokens": 3, "end_ids": (END,), "stop_sequences": ((2, 2),)},
}
PARAMS["all"] = {name: value for params in PARAMS.values() for name, value in params.items()}


@dataclass(frozen=True)
class ProcessedPair(Pair):
    """A pair whose target's logits are processed, context by context."""

    process: Callable[[np.ndarray, Context], np.ndarray]

    def target(self, context: Context) -> tuple[float, ...]:
        logits = np.log(np.array(super().target(context), dtype=np.float32))
        law = np.exp(self.process(logits, context).astype(np.float64))
        return tuple((law / law.sum()).tolist())

    def draft(self, context: Context) -> tuple[float, ...]:
        """The drafter knows nothing of the processing."""
        return Pair(self.seed).draft(context)


def processed_drafts(pair: ProcessedPair, drafting: tuple, sampling: SamplingParams, guide: TextGuide | None) -> Drafts:
    """All trees, with laws after their nodes as a step computes them."""
    shape, kind = drafting
    drafts = draw_all(pair, shape, kind)
    unprocessed = draw_all(Pair(pair.seed), shape, kind)
    assert torch.equal(unprocessed.tree.token_ids, drafts.tree.token_ids)
    logits = unprocessed.target.float().log()
    text = text_logits_of(Request(request_id=0, prompt_ids=PROMPT, sampling=sampling), 4, CPU, guide)
    assert text is not None
    text.extend([ROOT])
    processing = processing_of([text] * len(logits), CPU)
    assert processing is not None
    laws = processing.process(logits, drafts.tree).double().softmax(-1)
    return replace(drafts, target=laws)


@pytest.mark.parametrize("asked", PARAMS)
@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_processed_logits_keep_every_rules_law(name, kind, asked):
    sampling = SamplingParams(max_tokens=8, temperature=1.0, **PARAMS[asked])

    def process(logits: np.ndarray, context: Context) -> np.ndarray:
        return plain_logits.processed(logits, sampling, PROMPT, (ROOT, *context))

    for seed, shape in enumerate([chain_shape(3)] if name == "block" else SHAPES):
        pair = ProcessedPair(seed, process)
        drafts = processed_drafts(pair, (shape, kind), sampling, None)
        assert exact_law(drafts, RULES[name].accept).error(pair) <= 1e-6
        assert (pair.next_three - Pair(seed).next_three).abs().max() > 1e-3, "the processing changes nothing here"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> GuideCompiler:
    """Of a vocabulary of three letters and an end."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": ROOT, "b": 1, "c": 2, "</s>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("letters")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return GuideCompiler(path, (END,), 4)


NEXT = {ROOT: (1, 2, END), 1: (ROOT,), 2: (ROOT,), END: (END,)}
"""What `a(ba|ca)*` allows after each letter, and after a text that is over (never emitted)."""


def ended(law: torch.Tensor) -> torch.Tensor:
    """The law of texts that stop at their first end."""
    law = law.clone()
    law[END], law[END, END, END] = 0.0, law[END].sum()
    over = law[:END, END].sum(-1)
    law[:END, END] = 0.0
    law[:END, END, END] = over
    return law


def guided(logits: np.ndarray, context: Context) -> np.ndarray:
    barred = [token not in NEXT[(ROOT, *context)[-1]] for token in range(4)]
    return np.where(barred, -np.inf, logits)


@pytest.mark.parametrize(("name", "kind"), RULE_KINDS)
def test_a_guide_keeps_every_rules_law(name, kind, compiler):
    sampling = SamplingParams(max_tokens=8, temperature=1.0, end_ids=(END,))
    for seed, shape in enumerate([chain_shape(3)] if name == "block" else SHAPES):
        guide = compiler.compile(Guide(kind=GuideKind.REGEX, text="a(ba|ca)*"), (END,))
        pair = ProcessedPair(seed, guided)
        drafts = processed_drafts(pair, (shape, kind), sampling, guide)
        law = exact_law(drafts, RULES[name].accept).next_three
        assert (ended(law) - ended(pair.next_three)).abs().max() <= 1e-6
