"""Streams of many answers through one `Texts`, which may forget any of them at any time."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from furcate.builder.errors import RequestError
from furcate.decoding.request import FinishReason, Request, RequestStats, SamplingParams, StepOutput
from furcate.model_repository.answer import Answer
from furcate.model_repository.detokenize import Texts
from furcate.model_repository.engine_request import EngineDefaults, read_request
from furcate.model_repository.sampling_table import RESULT_OUTPUTS
from furcate.model_repository.tables import ENSEMBLE_STEPS

TEXTS = ("日本語 🌳 branch", "plain text, then END and more", "é" * 9)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_target)


def response(texts: Texts, key: int, earlier: list[int], new: list[int], reason: str) -> str:
    made = texts.outputs(
        {
            "TOKENS_BATCH": np.array([[new]], np.int32).reshape(1, 1, -1),
            "SEQUENCE_LENGTH": np.array([[len(new)]], np.int32),
            "ANSWER_KEY": np.array([[key]], np.int64),
            "EARLIER_IDS": np.array([earlier], np.int32).reshape(1, -1),
            "NUM_UNSEARCHED_IDS": np.array([[0]], np.int32),
            "FINISH_REASON": np.array([[reason.encode()]], np.object_),
            "STOP_TEXTS": np.array([[b"END"]], np.object_),
        }
    )
    assert made["OUTPUT_IDS"].tolist() == [new]
    return made["OUTPUT"][0, 0].decode()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), num_kept=st.integers(0, 3))
def test_pieces_make_the_whole_however_answers_interleave_and_are_forgotten(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject, num_kept: int
) -> None:
    texts = Texts(tokenizer, num_kept_answers=num_kept)
    ids = [tokenizer.encode(text) for text in TEXTS]
    whole = [response(Texts(tokenizer), key, [], ids[key], "length") for key in range(3)]
    assert whole[1] == "plain text, then "
    positions, shown = [0, 0, 0], ["", "", ""]
    while any(position < len(each) for position, each in zip(positions, ids, strict=True)):
        key = data.draw(st.sampled_from([k for k in range(3) if positions[k] < len(ids[k])]))
        start, end = positions[key], positions[key] + data.draw(st.integers(1, 7))
        reason = "length" if end >= len(ids[key]) else ""
        shown[key] += response(texts, key, ids[key][:start], ids[key][start:end], reason)
        positions[key] = end
    assert shown == whole


def test_tokens_alone_are_enough(tokenizer: PreTrainedTokenizerFast) -> None:
    """The old contract's two inputs: a whole answer, rows longer than their length."""
    ids = tokenizer.encode("branch 🌳")
    made = Texts(tokenizer).outputs(
        {
            "TOKENS_BATCH": np.array([[[*ids, 5, 5]]], np.int32),
            "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32),
        }
    )
    assert made["OUTPUT"].tolist() == [["branch 🌳".encode()]]


def test_results_come_out_as_the_engine_model_gave_them(tokenizer: PreTrainedTokenizerFast) -> None:
    request = Request(request_id=1, prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=3, returns_log_probs=True))
    asked = read_request(
        {
            "input_ids": np.array([[5, 6]], np.int32),
            "input_lengths": np.array([[2]], np.int32),
            "request_output_len": np.array([[3]], np.int32),
        },
        EngineDefaults(end_ids=(), vocab_size=300),
    )
    answer = Answer(request=request, asked=asked, client_id="", tokenizer=tokenizer)
    stats = RequestStats(num_prompt_tokens=2, num_emitted_tokens=2, num_target_steps=1, arrival_time_ns=2**62 + 1)
    answer.take(StepOutput(request_id=1, token_ids=(7, 8), log_probs=(-0.1, -2.5), stats=stats))
    given = answer.last_outputs(FinishReason.LENGTH)
    step = next(step for step in ENSEMBLE_STEPS if step.model_name == "postprocessing")
    engine = next(step for step in ENSEMBLE_STEPS if step.model_name == "tensorrt_llm")
    known = {target: given[name] for name, target in engine.outputs.items()}
    made = Texts(tokenizer).outputs({name: known[source] for name, source in step.inputs.items()})
    for field in RESULT_OUTPUTS:
        assert made[field.name].dtype == given[field.name].dtype
        assert made[field.name].tolist() == given[field.name].tolist(), field.name
    assert made["output_log_probs"].tolist() == [[[np.float32(-0.1), np.float32(-2.5)]]]


@pytest.mark.parametrize("results", [b"{", b"[1]", b"7", b"\xff"])
def test_results_that_the_engine_model_did_not_give_are_refused(
    tokenizer: PreTrainedTokenizerFast, results: bytes
) -> None:
    tensors = {
        "TOKENS_BATCH": np.array([[[5]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[1]], np.int32),
        "RESULTS": np.array([[results]], np.object_),
    }
    with pytest.raises(RequestError, match="'RESULTS' is not"):
        Texts(tokenizer).outputs(tensors)


def test_a_response_without_results_is_for_nobody() -> None:
    assert Texts.are_for_nobody({"RESULTS": np.array([[b""]], np.object_)})
    assert not Texts.are_for_nobody({"RESULTS": np.array([[b"{}"]], np.object_)})
    assert not Texts.are_for_nobody({})
