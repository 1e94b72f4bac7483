"""Log-probabilities, guides, penalties and min_tokens as a request to `tensorrt_llm` asks for them, on a real engine."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.answer import Answer
from furcate.model_repository.engine_request import EngineDefaults, read_request

DEFAULTS = EngineDefaults(end_ids=(1,), vocab_size=300)


@pytest.fixture(scope="module")
def scheduler(tiny_engine: Callable[..., Path]) -> Scheduler:
    return Scheduler.from_engine(tiny_engine("eagle3"))


@pytest.fixture(scope="module")
def tokenizer(tiny_engine: Callable[..., Path]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_engine("eagle3") / "tokenizer")


def responses(
    scheduler: Scheduler, tokenizer: PreTrainedTokenizerFast, **inputs: object
) -> list[dict[str, np.ndarray]]:
    """All responses to one request."""
    tensors = {
        "input_ids": np.array([[9, 8, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[40]], np.int32),
    }
    kinds = {float: np.float32, int: np.int32, bool: np.bool_, bytes: np.object_}
    for name, value in inputs.items():
        tensors[name] = value if isinstance(value, np.ndarray) else np.array([[value]], kinds[type(value)])
    asked = read_request(tensors, DEFAULTS)
    request = Request(request_id=0, prompt_ids=asked.prompt_ids, sampling=asked.sampling)
    answer = Answer(request=request, asked=asked, client_id="", tokenizer=tokenizer)
    scheduler.add(request)
    found = []
    while True:
        (output,) = scheduler.step([0])
        reason = answer.take(output)
        if reason is not None:
            scheduler.cancel(0)
            return [*found, answer.last_outputs(reason)]
        outputs = answer.outputs(probe_interval_s=60)
        if outputs is not None:
            found.append(outputs)


def test_log_probs_come_with_their_tokens_and_add_up(scheduler, tokenizer):
    streamed = responses(
        scheduler, tokenizer, streaming=True, return_log_probs=True, presence_penalty=2.0, temperature=0.7
    )
    so_far = 0.0
    for response in streamed:
        log_probs = response["output_log_probs"][0, 0]
        assert len(log_probs) == response["sequence_length"].item()
        assert np.all(log_probs <= 0)
        so_far += log_probs.sum(dtype=np.float64)
        # The sum is a float32.
        assert math.isclose(response["cum_log_probs"].item(), so_far, rel_tol=1e-5)
    (bare,) = responses(scheduler, tokenizer)
    assert bare["output_log_probs"].size == bare["cum_log_probs"].size == 0


def test_a_guided_text_meets_its_schema(scheduler, tokenizer):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    (response,) = responses(
        scheduler,
        tokenizer,
        guided_decoding_guide_type=b"json_schema",
        guided_decoding_guide=json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}).encode(),
    )
    ids = response["output_ids"][0, 0].tolist()
    assert ids[-1] == 1
    assert json.loads(tokenizer.decode(ids[:-1]))["n"] in (1, 2)
    assert response["finish_reason"][0, 0] == b"end_id"


def test_penalties_and_bad_words_reach_the_text(scheduler, tokenizer):
    def ids(**inputs: object) -> list[int]:
        return responses(scheduler, tokenizer, end_id=-1, **inputs)[-1]["output_ids"][0, 0].tolist()

    plain = ids()
    assert len(set(ids(presence_penalty=100.0))) == 40
    assert ids(repetition_penalty=3.0) != plain
    assert plain[3] not in ids(bad_words_list=np.array([[[plain[3]], [1]]], np.int32))


def test_no_stop_text_is_looked_for_in_the_first_min_tokens(scheduler, tokenizer):
    """Its tokens are all letters 'b': the stop text is everywhere, but the text runs on to the minimum."""
    bias = np.zeros((1, 300), np.float32)
    letter = tokenizer.convert_tokens_to_ids("b")
    bias[0, letter] = 90.0
    inputs = {"embedding_bias": bias, "stop_texts": np.array([[b"b"]], np.object_)}
    (at_once,) = responses(scheduler, tokenizer, **inputs)
    assert at_once["sequence_length"].item() == 1
    (later,) = responses(scheduler, tokenizer, min_tokens=7, **inputs)
    assert later["sequence_length"].item() == 8, (
        "the token that completes the stop text is sent; postprocessing cuts it"
    )
    assert later["num_unsearched_ids"].item() == 7
    assert later["finish_reason"][0, 0] == b"stop"


def test_defaults_ask_nothing_of_the_logits(scheduler):
    """What every request without such inputs becomes must cost its step nothing."""
    assert read_request(
        {
            "input_ids": np.array([[3]], np.int32),
            "input_lengths": np.array([[1]], np.int32),
            "request_output_len": np.array([[5]], np.int32),
            "repetition_penalty": np.array([[1.0]], np.float32),
            "min_p": np.array([[0.0]], np.float32),
        },
        DEFAULTS,
    ).sampling == SamplingParams(max_tokens=5, end_ids=(1,))
