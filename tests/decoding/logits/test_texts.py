"""Texts with processed logits: what is drafted changes nothing, who shares the batch changes nothing."""

import json
import re

import pytest
import torch
from knowing_drafter import KnowingProposer

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import FinishReason, Guide, GuideKind, Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

TREES = ["chain:5", "mc_sim_7b_63", "dynamic:24/4/4"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{2,5}$"},
            "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
PATTERN = "([a-f]{3,8}-[0-9]{2}){1,3}"
BAD_WORDS = (
    *((token,) for token in range(2, 258, 3)),
    *((first, last) for first in range(3, 258, 3) for last in range(first % 2 + 3, 258, 2)),
)
PROCESSORS = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 6.0},
    "frequency": {"frequency_penalty": -3.0},  # draws repeats in, so that a near-uniform law shows it too
    "bias": {"embedding_bias": tuple((token, 9.0) for token in range(60, 70))},
    "bad words": {"bad_sequences": BAD_WORDS},
    "min_tokens": {"min_tokens": 20},
    "min_p": {"min_p": 0.4},
    "regex": {"guide": Guide(kind=GuideKind.REGEX, text=PATTERN)},
    "schema": {"guide": Guide(kind=GuideKind.JSON_SCHEMA, text=SCHEMA)},
}
PROCESSORS["penalties and bias"] = (
    PROCESSORS["repetition"] | PROCESSORS["presence"] | PROCESSORS["frequency"] | PROCESSORS["bias"]
)
PROCESSORS["all but guides"] = (
    PROCESSORS["penalties and bias"] | PROCESSORS["bad words"] | PROCESSORS["min_tokens"] | PROCESSORS["min_p"]
)
PROCESSORS["guide and penalties"] = PROCESSORS["regex"] | PROCESSORS["repetition"] | {"bad_sequences": ((61, 62),)}
LENGTHS = [1, 17, 2, 40, 5, 33, 64, 3, 9, 12, 21, 7, 30, 4]


@pytest.fixture(scope="module")
def executor(tiny_engine) -> TorchExecutor:
    return TorchExecutor(read_engine(tiny_engine("eagle3")))


def requests_of(executor: TorchExecutor, temperature: float) -> list[Request]:
    """One request for each way of processing, of different lengths, seeds and limits, and one that asks for nothing."""
    generator = torch.Generator().manual_seed(7)
    requests = []
    for index, (params, length) in enumerate(zip([*PROCESSORS.values(), {}], LENGTHS, strict=False)):
        sampling = SamplingParams(
            max_tokens=60 if "guide" in params else 28 + index,
            temperature=temperature * (1 + index / 10),
            seed=index,
            end_ids=(1,),
            returns_log_probs=True,
            **params,
        )
        prompt = tuple(torch.randint(2, 258, (length,), generator=generator).tolist())
        requests.append(Request(request_id=index, prompt_ids=prompt, sampling=sampling))
    return requests


def run_all(scheduler: Scheduler, requests: list[Request]):
    """Texts, log-probabilities and last outputs by request id."""
    for request in requests:
        scheduler.add(request)
    texts = {request.request_id: () for request in requests}
    log_probs = {request.request_id: () for request in requests}
    last = {}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
            log_probs[output.request_id] += output.log_probs
            last[output.request_id] = output
    assert scheduler.num_allocated_pages == 0
    return texts, log_probs, last


@pytest.fixture(scope="module")
def plain(executor):
    """Each request alone and without speculation, by temperature."""
    results = {}
    for temperature in (0.0, 0.9):
        texts, log_probs = {}, {}
        for request in requests_of(executor, temperature):
            scheduler = Scheduler(executor, parse_tree("single", executor.head.kind, 0))
            found = run_all(scheduler, [request])
            texts |= found[0]
            log_probs |= found[1]
        results[temperature] = texts, log_probs
    return results


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", TREES)
def test_texts_of_a_mixed_batch_equal_plain_decoding_of_each_request_alone(executor, plain, tree, temperature):
    texts, log_probs = plain[temperature]
    scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind, 0))
    scheduler._step.proposer = KnowingProposer(scheduler, texts)
    requests = requests_of(executor, temperature)
    found, found_log_probs, last = run_all(scheduler, requests)
    assert found == texts
    stats = [output.stats for output in last.values()]
    accepted = sum(stat.num_accepted_draft_tokens for stat in stats)
    assert accepted > 2 * sum(stat.num_target_steps for stat in stats), "paths must be deep for this to prove anything"
    for request in requests:
        expected = torch.tensor(log_probs[request.request_id])
        assert len(expected) == len(texts[request.request_id])
        # Float32 sums of 60 nodes in one pass or of one node in each of many passes.
        torch.testing.assert_close(torch.tensor(found_log_probs[request.request_id]), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_processor_changes_its_text(executor, plain, temperature):
    """Otherwise the equalities above would say nothing about it. min_p leaves the argmax, min_tokens a text without an end."""
    texts, _ = plain[temperature]
    scheduler = Scheduler(executor, parse_tree("single", executor.head.kind, 0))
    bare = [
        Request(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=SamplingParams(
                max_tokens=request.sampling.max_tokens,
                temperature=request.sampling.temperature,
                seed=request.request_id,
            ),
        )
        for request in requests_of(executor, temperature)
    ]
    unprocessed, _, _ = run_all(scheduler, bare)
    names = [*PROCESSORS, "nothing"]
    same = {names[index] for index in texts if texts[index] == unprocessed[index]}
    assert same <= {"nothing", "min_tokens", "min_p"}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_guided_texts_match_their_guide(executor, plain, temperature):
    texts, _ = plain[temperature]
    for index, params in enumerate(PROCESSORS.values()):
        if "guide" not in params:
            continue
        assert texts[index][-1] == 1, "the guide lets every text end within the limit"
        text = text_of(executor, texts[index][:-1])
        if params["guide"].kind is GuideKind.REGEX:
            assert re.fullmatch(PATTERN, text)
        else:
            value = json.loads(text)
            assert re.fullmatch("[a-z]{2,5}", value["name"])
            assert set(value["sizes"]) <= {1, 22, 333}


def text_of(executor: TorchExecutor, token_ids: tuple[int, ...]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(executor.tokenizer_dir).decode(list(token_ids))


@pytest.mark.parametrize("tree", ["single", "dynamic:24/4/4"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 9])
def test_an_end_comes_right_after_min_tokens_when_it_is_always_likeliest(executor, tree, min_tokens):
    scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind, 0))
    common = {"max_tokens": 20, "min_tokens": min_tokens}
    pairs = ((50, 51), (51, 50), (50, 50), (51, 51))
    params = [
        SamplingParams(**common, embedding_bias=((1, 80.0),), end_ids=(1,)),
        SamplingParams(**common, embedding_bias=((50, 80.0),), stop_sequences=((50,),)),
        SamplingParams(**common, embedding_bias=((50, 80.0), (51, 80.0)), stop_sequences=pairs),
    ]
    requests = [Request(request_id=index, prompt_ids=(5, 6, 7), sampling=s) for index, s in enumerate(params)]
    texts, _, last = run_all(scheduler, requests)
    assert [last[index].finish_reason for index in range(3)] == [
        FinishReason.END_ID,
        FinishReason.STOP,
        FinishReason.STOP,
    ]
    assert len(texts[0]) == min_tokens + 1, "the end id is emitted, and is not one of the minimum"
    assert len(texts[1]) == min_tokens
    assert len(texts[2]) >= min_tokens, "a pair that is barred also keeps its second token from beginning the next pair"


def test_log_probs_are_those_of_the_raw_logits_and_arrive_with_their_tokens(executor, tiny_target):
    """Also where tokens are held back because they may begin a stop sequence."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    sampling = SamplingParams(
        max_tokens=20,
        temperature=0.8,
        top_k=20,
        seed=3,
        returns_log_probs=True,
        presence_penalty=2.0,
        repetition_penalty=1.3,
    )
    request = Request(request_id=0, prompt_ids=(9, 8, 7), sampling=sampling)
    scheduler = Scheduler(executor, parse_tree("dynamic:24/4/4", executor.head.kind, 0))
    (text,) = run_all(scheduler, [request])[0].values()
    with torch.inference_mode():
        logits = model(torch.tensor([request.prompt_ids + text])).logits[0]
    expected = logits[2:-1].log_softmax(-1).gather(1, torch.tensor(text)[:, None]).squeeze(1)
    held = SamplingParams(**{**vars(sampling), "stop_sequences": ((text[4], text[5], 299), (text[9], 299))})
    for params in (sampling, held):
        scheduler.add(Request(request_id=0, prompt_ids=request.prompt_ids, sampling=params))
        token_ids, log_probs = (), ()
        while scheduler.sequences:
            (output,) = scheduler.step()
            assert len(output.token_ids) == len(output.log_probs)
            token_ids += output.token_ids
            log_probs += output.log_probs
        assert token_ids == text
        # transformers runs the same weights with another attention: float32 rounding through six layers.
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=2e-3, rtol=0)


def test_a_text_that_nothing_may_follow_ends_with_a_sentence_and_alone(executor):
    stuck = SamplingParams(
        max_tokens=20, guide=Guide(kind=GuideKind.REGEX, text="ab"), end_ids=(1,), min_tokens=9, seed=0
    )
    fine = SamplingParams(max_tokens=12)
    requests = [Request(request_id=index, prompt_ids=(5, 6), sampling=s) for index, s in enumerate((stuck, fine))]
    scheduler = Scheduler(executor, parse_tree("chain:3", executor.head.kind, 0))
    texts, _, last = run_all(scheduler, requests)
    assert text_of(executor, texts[0]) == "ab"
    assert last[0].finish_reason is FinishReason.CANCELLED
    assert "no token may come next" in last[0].error
    assert last[1].finish_reason is FinishReason.LENGTH
    assert len(texts[1]) == 12
