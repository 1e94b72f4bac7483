"""What a wrong request is told by the real server, and that others never notice."""

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from furcate.builder.errors import RequestError
from furcate.client import Client
from furcate.client.messages import plain_message
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

TEXT = np.array([[b"Hello"]], dtype=np.object_)
THREE = np.array([[3]], dtype=np.int32)


@pytest.fixture(scope="module", params=["grpc", "http"])
def client(request: pytest.FixtureRequest, tiny_server: TritonServer) -> Iterator[Client]:
    url = tiny_server.grpc_url if request.param == "grpc" else tiny_server.http_url
    with Client(url, deadline_s=60) as client:
        yield client


REFUSALS = {
    "prompt over the limit": (
        {"prompt": "x" * 390, "max_tokens": 20},
        r"the prompt has 390 tokens and max_tokens is 20, .* limit is 400",
    ),
    "empty prompt": ({"prompt": ""}, "'text_input' is empty; send at least one character"),
    "negative max_tokens": ({"max_tokens": -5}, "max_tokens is -5; it must be at least 1"),
    "temperature -1": ({"temperature": -1.0}, r"temperature is -1.0; it must be 0 \(greedy\) or a positive number"),
    "temperature NaN": ({"temperature": float("nan")}, "'temperature' is nan, which is no FP32 value"),
    "top_p over 1": ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
    "top_k below 0": ({"top_k": -3}, "top_k is -3; it must be at least 1"),
    "beam_width 4": ({"beam_width": 4}, "'beam_width' cannot be used: beam search is not supported"),
    "two texts": ({"num_return_sequences": 2}, "'num_return_sequences' cannot be used: a request gives one text"),
    "logits": ({"return_context_logits": True}, "'return_context_logits' cannot be used: logits are not returned"),
    "guide": (
        {"guided_decoding_guide_type": "xml"},
        "'guided_decoding_guide_type' is 'xml'; it can be json, json_schema",
    ),
    "schema": (
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "objekt"}'},
        "the json_schema guide cannot be followed",
    ),
    "LoRA": ({"lora_task_id": 7}, "'lora_task_id' cannot be used: LoRA adapters are not supported"),
    "prompt table": ({"prompt_vocab_size": 4}, "'prompt_vocab_size' cannot be used: prompt embedding tables"),
    "decoder text": ({"decoder_text_input": "x"}, "'decoder_text_input' cannot be used: encoder-decoder models"),
    "two names": ({"seed": 1, "random_seed": 2}, "'seed' is 1, but its older name 'random_seed' says 2"),
    "end_id outside": ({"end_id": 300}, "'end_id' is 300, but the vocabulary has the tokens 0 to 299"),
    "bias without weights": ({"embedding_bias_words": ["a"]}, "has 1 words and 'embedding_bias_weights' 0 weights"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_request_gets_its_sentence(case: str, client: Client) -> None:
    options, sentence = REFUSALS[case]
    options = {"prompt": "Hello", **options}
    with pytest.raises(RequestError, match=sentence) as caught:
        client.generate(options.pop("prompt"), **options)
    assert "\n" not in str(caught.value)
    assert "ensemble" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("case", ["prompt over the limit", "temperature -1", "beam_width 4"])
def test_running_streams_do_not_notice_a_wrong_request(case: str, client: Client) -> None:
    alone = client.generate("Hello", max_tokens=40, end_id=-1)
    stream = client.stream("Hello", max_tokens=40, end_id=-1)
    next(stream)
    options = {"prompt": "Hello", **REFUSALS[case][0]}
    with pytest.raises(RequestError):
        client.generate(options.pop("prompt"), **options)
    for _ in stream:
        pass
    assert stream.generation.token_ids == alone.token_ids


def error_of(server: TritonServer, inputs: dict[str, np.ndarray], model: str = "ensemble") -> str:
    """The message that a plain gRPC stream of NVIDIA's client gets for these inputs."""
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensors = []
        for name, array in inputs.items():
            tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensors.append(tensor.set_data_from_numpy(array))
        client.async_stream_infer(model, tensors)
        result, error = answers.get(timeout=30)
        client.stop_stream()
    assert result is None
    return plain_message(error.message())


RAW_REFUSALS = {
    "unknown input": (
        {"text_input": TEXT, "max_tokens": THREE, "colour": THREE},
        "unexpected inference input 'colour'",
    ),
    "wrong dtype": (
        {"text_input": TEXT, "max_tokens": THREE.astype(np.int64)},
        "inference input 'max_tokens' data-type is 'INT64', but model 'ensemble' expects 'INT32'",
    ),
    "missing input": ({"text_input": TEXT}, r"missing required input\(s\) \['max_tokens'\]"),
    "two prompts": (
        {"text_input": np.repeat(TEXT, 2, axis=0), "max_tokens": np.repeat(THREE, 2, axis=0)},
        r"'text_input' has shape \[2, 1\]: a request carries one prompt, so the shape must be \[1, 1\]",
    ),
    "two limits": (
        {"text_input": TEXT, "max_tokens": np.array([[3, 4]], np.int32)},
        r"unexpected shape for input 'max_tokens' for model 'ensemble'\. Expected \[-1,1\], got \[1,2\]\.$",
    ),
    "prompt that is not UTF-8": (
        {"text_input": np.array([[b"ab\xff"]], dtype=np.object_), "max_tokens": THREE},
        "'text_input' is not UTF-8: byte 2 cannot be read",
    ),
    "stop word that is not UTF-8": (
        {"text_input": TEXT, "max_tokens": THREE, "stop_words": np.array([[b"ab\xff"]], dtype=np.object_)},
        "'stop_words' is not UTF-8: byte 2 cannot be read",
    ),
    "temperature NaN": (
        {"text_input": TEXT, "max_tokens": THREE, "temperature": np.array([[np.nan]], np.float32)},
        "temperature is nan; it must be 0",
    ),
}


@pytest.mark.parametrize("case", RAW_REFUSALS)
def test_ill_shaped_request_gets_one_sentence(case: str, tiny_server: TritonServer) -> None:
    inputs, sentence = RAW_REFUSALS[case]
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(error_of(tiny_server, inputs))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"input_lengths": np.array([[9]], np.int32)}, "'input_lengths' is 9, but 'input_ids' has 2 tokens"),
        ({"input_ids": np.array([[5, 300]], np.int32)}, "prompt token id 300 is not in the vocabulary"),
        ({"input_ids": np.zeros((1, 0), np.int32), "input_lengths": np.zeros((1, 1), np.int32)}, "the prompt is empty"),
        ({"stop_words_list": np.array([[[5, 6], [2, 1]]], np.int32)}, r"'stop_words_list' has the ends \[2, 1\]"),
        ({"embedding_bias": np.ones((1, 7), np.float32)}, "'embedding_bias' has 7 values, but the vocabulary has 300"),
        (
            {"exclude_input_in_output": np.array([[False]]), "streaming": np.array([[True]])},
            "a stream never repeats the prompt",
        ),
    ],
)
def test_wrong_tokens_are_refused_by_the_engine_model(
    changes: dict[str, np.ndarray], sentence: str, tiny_server: TritonServer
) -> None:
    inputs = {
        "input_ids": np.array([[5, 6]], np.int32),
        "input_lengths": np.array([[2]], np.int32),
        "request_output_len": THREE,
    }
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(error_of(tiny_server, {**inputs, **changes}, model="tensorrt_llm"))


def test_http_gives_the_status_400_and_the_sentence(tiny_server: TritonServer) -> None:
    body = json.dumps({"text_input": "Hello", "max_tokens": 0}).encode()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{tiny_server.http_url}/v2/models/ensemble/generate", data=body)
    with caught.value as error:
        assert error.code == 400
        assert "max_tokens is 0; it must be at least 1" in json.load(error)["error"]
