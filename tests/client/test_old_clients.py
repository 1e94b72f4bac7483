"""Clients of the ensemble that TensorRT-LLM had work unchanged: its request names and shapes, as they sent them.

Those clients send every input they know, most with a value that changes nothing; every tensor is [1, 1], and lists of words hold
one empty word when there are none. Over gRPC they use NVIDIA's streaming call for all models of that ensemble.
"""

import json
import queue
import urllib.request
from collections.abc import Mapping

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from furcate.client import Client
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

PROMPT = "Old clients"
MAX_TOKENS = 24


@pytest.fixture(scope="module", params=["tiny_server", "tiny_staged_server"])
def server(request: pytest.FixtureRequest) -> TritonServer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(server: TritonServer) -> str:
    with Client(server.grpc_url, deadline_s=90) as client:
        return client.generate(PROMPT, max_tokens=MAX_TOKENS).text


def end_to_end_inputs(*, is_streaming: bool) -> dict[str, np.ndarray]:
    """What the end-to-end client sends to `ensemble`."""
    return {
        "text_input": np.array([[PROMPT]], dtype=object),
        "max_tokens": np.array([[MAX_TOKENS]], dtype=np.int32),
        "bad_words": np.array([[""]], dtype=object),
        "stop_words": np.array([[""]], dtype=object),
        "stream": np.array([[is_streaming]], dtype=bool),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "top_k": np.array([[1]], dtype=np.int32),
        "top_p": np.array([[0.0]], dtype=np.float32),
        "length_penalty": np.array([[1.0]], dtype=np.float32),
        "repetition_penalty": np.array([[1.0]], dtype=np.float32),
        "presence_penalty": np.array([[0.0]], dtype=np.float32),
        "frequency_penalty": np.array([[0.0]], dtype=np.float32),
        "random_seed": np.array([[0]], dtype=np.uint64),
        "return_log_probs": np.array([[False]], dtype=bool),
        "return_context_logits": np.array([[False]], dtype=bool),
        "return_generation_logits": np.array([[False]], dtype=bool),
        "num_return_sequences": np.array([[1]], dtype=np.int32),
        "exclude_input_in_output": np.array([[True]], dtype=bool),
    }


def token_inputs(ids: list[int], *, is_streaming: bool) -> dict[str, np.ndarray]:
    """What the token client sends to `tensorrt_llm`."""
    return {
        "input_ids": np.array([ids], dtype=np.int32),
        "input_lengths": np.array([[len(ids)]], dtype=np.int32),
        "request_output_len": np.array([[MAX_TOKENS]], dtype=np.int32),
        "num_return_sequences": np.array([[1]], dtype=np.int32),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "runtime_top_k": np.array([[1]], dtype=np.int32),
        "runtime_top_p": np.array([[0.0]], dtype=np.float32),
        "len_penalty": np.array([[1.0]], dtype=np.float32),
        "repetition_penalty": np.array([[1.0]], dtype=np.float32),
        "streaming": np.array([[is_streaming]], dtype=bool),
        "end_id": np.array([[1]], dtype=np.int32),
        "pad_id": np.array([[1]], dtype=np.int32),
        "return_log_probs": np.array([[False]], dtype=bool),
    }


def grpc_stream(server: TritonServer, model: str, inputs: Mapping[str, np.ndarray]) -> list[triton.InferResult]:
    """The results up to the one that says it is the last: start_stream, async_stream_infer, a callback, a queue."""
    answers: queue.Queue = queue.Queue()
    tensors = []
    for name, array in inputs.items():
        tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    results = []
    with triton.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, tensors, request_id="1", enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=90)
            assert error is None, error
            response = result.get_response()
            if response.outputs:
                results.append(result)
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return results


@pytest.mark.parametrize("is_streaming", [False, True])
def test_the_end_to_end_client_reads_text_output(server: TritonServer, expected: str, is_streaming: bool) -> None:
    results = grpc_stream(server, "ensemble", end_to_end_inputs(is_streaming=is_streaming))
    assert (len(results) > 3) == is_streaming
    text = b"".join(item for result in results for item in result.as_numpy("text_output").reshape(-1))
    # A stream's pieces are whole characters only at its end.
    assert text.decode() == expected
    last = results[-1]
    assert sum(int(result.as_numpy("num_output_tokens").item()) for result in results) <= MAX_TOKENS
    assert last.as_numpy("sequence_index").tolist() == last.as_numpy("batch_index").tolist() == [[0]]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_the_token_client_reads_output_ids(server: TritonServer, is_streaming: bool) -> None:
    results = grpc_stream(server, "tensorrt_llm", token_inputs([9, 20, 31], is_streaming=is_streaming))
    ids: list[int] = []
    for result in results:
        output_ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        assert output_ids.shape[:2] == lengths.shape == (1, 1)
        ids += output_ids[0, 0, : lengths[0, 0]].tolist()
    assert (len(results) > 3) == is_streaming
    assert 0 < len(ids) <= MAX_TOKENS


def test_http_generate_gives_one_answer(server: TritonServer, expected: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": MAX_TOKENS, "bad_words": "", "stop_words": ""}
    with urllib.request.urlopen(
        f"{server.http_url}/v2/models/ensemble/generate", data=json.dumps(body).encode(), timeout=90
    ) as answer:
        assert json.load(answer)["text_output"] == expected


def test_http_generate_stream_gives_the_same_in_pieces(server: TritonServer, expected: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": MAX_TOKENS, "stream": True, "temperature": 1.0, "top_k": 1}
    with urllib.request.urlopen(
        f"{server.http_url}/v2/models/ensemble/generate_stream", data=json.dumps(body).encode(), timeout=90
    ) as answer:
        lines = [line.decode() for line in answer if line.startswith(b"data: ")]
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]
    assert len(pieces) > 3
    assert "".join(pieces) == expected
