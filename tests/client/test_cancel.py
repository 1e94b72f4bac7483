"""Cancelling reaches the engine through the ensemble, however a client leaves."""

import itertools
import json
import queue
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from furcate.client import Client
from furcate.client.server import TritonServer
from furcate.decoding.request import FinishReason

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", params=["grpc", "http"])
def client(request: pytest.FixtureRequest, tiny_server: TritonServer) -> Iterator[Client]:
    url = tiny_server.grpc_url if request.param == "grpc" else tiny_server.http_url
    with Client(url, deadline_s=60) as client:
        yield client


def gauge(server: TritonServer, name: str) -> float:
    with urllib.request.urlopen(server.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def assert_idle_soon(server: TritonServer) -> None:
    """No page is held any more, long before the longest answer could have ended by itself."""
    for _ in range(100):
        if gauge(server, "furcate_pages_allocated") == 0 and gauge(server, "furcate_live_requests") == 0:
            return
        time.sleep(0.01)
    pytest.fail("a cancelled request still holds pages after a second")


def test_cancel_ends_a_stream_with_its_reason(client: Client, tiny_server: TritonServer) -> None:
    stream = client.stream("Hello", max_tokens=390, end_id=-1)
    next(stream)
    assert gauge(tiny_server, "furcate_pages_allocated") > 0
    assert client.cancel(stream.request_id)
    for _ in stream:
        pass
    assert stream.generation.finish_reason is FinishReason.CANCELLED
    assert 0 < stream.generation.num_tokens < 390
    assert stream.generation.num_tokens == len(stream.generation.token_ids)
    assert_idle_soon(tiny_server)


def test_leaving_a_stream_cancels_it(client: Client, tiny_server: TritonServer) -> None:
    with client.stream("Hello", max_tokens=390, end_id=-1) as stream:
        list(itertools.islice(stream, 2))
        assert gauge(tiny_server, "furcate_live_requests") == 1
    assert_idle_soon(tiny_server)


def test_cancelling_an_unknown_request_says_so(client: Client) -> None:
    assert not client.cancel("nobody-has-this-id")


def test_cancel_before_its_request_arrives_holds(client: Client, tiny_server: TritonServer) -> None:
    stream = client.stream("Hello", max_tokens=390, end_id=-1)
    assert not client.cancel(stream.request_id)
    for _ in stream:
        pass
    assert stream.generation.finish_reason is FinishReason.CANCELLED
    assert stream.generation.num_tokens == 0
    assert_idle_soon(tiny_server)


def test_only_the_named_request_is_cancelled(client: Client, tiny_server: TritonServer) -> None:
    alone = client.generate("Hello", max_tokens=60, end_id=-1)
    first, second = (client.stream("Hello", max_tokens=60, end_id=-1) for _ in range(2))
    next(first), next(second)
    first.close()
    for _ in second:
        pass
    assert second.generation.token_ids == alone.token_ids
    assert_idle_soon(tiny_server)


def test_the_old_stop_input_cancels_the_request_of_the_same_id(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url) as client:
        stream = client.stream("Hello", max_tokens=390, end_id=-1)
        next(stream)
        with triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://")) as plain:
            plain.start_stream(lambda result, error: None)
            tensors = []
            for name, array in {
                "input_ids": np.zeros((1, 1), np.int32),
                "input_lengths": np.ones((1, 1), np.int32),
                "request_output_len": np.ones((1, 1), np.int32),
            }.items():
                tensors.append(triton.InferInput(name, [1, 1], "INT32").set_data_from_numpy(array))
            tensors.append(triton.InferInput("stop", [1, 1], "BOOL").set_data_from_numpy(np.array([[True]])))
            plain.async_stream_infer("tensorrt_llm", tensors, request_id=stream.request_id)
            for _ in stream:
                pass
            plain.stop_stream()
        assert stream.generation.finish_reason is FinishReason.CANCELLED
    assert_idle_soon(tiny_server)


def test_a_stream_to_the_engine_model_is_cancelled_by_its_channel(tiny_server: TritonServer) -> None:
    client = triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://"))
    client.start_stream(lambda result, error: None)
    values = {"input_ids": 5, "input_lengths": 1, "request_output_len": 390, "end_id": -1}
    tensors = [
        triton.InferInput(name, [1, 1], "INT32").set_data_from_numpy(np.array([[value]], np.int32))
        for name, value in values.items()
    ]
    tensors.append(triton.InferInput("streaming", [1, 1], "BOOL").set_data_from_numpy(np.array([[True]])))
    client.async_stream_infer("tensorrt_llm", tensors)
    for _ in range(200):
        if gauge(tiny_server, "furcate_live_requests") == 1:
            break
        time.sleep(0.01)
    client.stop_stream(cancel_requests=True)
    client.close()
    assert_idle_soon(tiny_server)


def ensemble_inputs(*, is_streaming: bool) -> list[triton.InferInput]:
    """What another client than ours sends: 390 tokens, which take the tiny engine seconds."""
    arrays = {
        "text_input": np.array([[b"Hello"]], np.object_),
        "max_tokens": np.array([[390]], np.int32),
        "end_id": np.array([[-1]], np.int32),
        "stream": np.array([[is_streaming]]),
    }
    return [
        triton.InferInput(name, [1, 1], np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        for name, array in arrays.items()
    ]


def test_a_cancelled_stream_of_any_client_ends_behind_the_ensemble(tiny_server: TritonServer) -> None:
    answers: queue.Queue[object] = queue.Queue()
    client = triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://"))
    client.start_stream(lambda result, error: answers.put(result or error))
    client.async_stream_infer("ensemble", ensemble_inputs(is_streaming=True))
    answers.get(timeout=30)
    assert gauge(tiny_server, "furcate_live_requests") == 1
    client.stop_stream(cancel_requests=True)
    assert_idle_soon(tiny_server)
    client.close()
    assert answers.qsize() < 100


@pytest.mark.parametrize("is_cancel", [True, False], ids=["cancelled", "channel closed"])
def test_a_single_answer_whose_grpc_client_leaves_ends_too(tiny_server: TritonServer, is_cancel: bool) -> None:
    """Nothing has been sent to it yet: responses without results show `postprocessing` that it is gone."""
    client = triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://"))
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("ensemble", ensemble_inputs(is_streaming=False))
    for _ in range(500):
        if gauge(tiny_server, "furcate_pages_allocated") > 0:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the request never got a page")
    if is_cancel:
        client.stop_stream(cancel_requests=True)
    else:
        client._client_stub = None
        client._channel.close()
    assert_idle_soon(tiny_server)


def test_who_waits_for_a_single_answer_gets_one_response(tiny_server: TritonServer) -> None:
    answers: queue.Queue[object] = queue.Queue()
    with triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("ensemble", ensemble_inputs(is_streaming=False))
        whole = answers.get(timeout=60)
        client.stop_stream()
    assert isinstance(whole, triton.InferResult), whole
    assert whole.as_numpy("output_token_ids").size == whole.as_numpy("num_output_tokens").item() == 390
    assert whole.as_numpy("finish_reason").item() == b"length"
    assert answers.empty()
    assert_idle_soon(tiny_server)


@pytest.mark.parametrize("model_name", ["ensemble", "tensorrt_llm"])
def test_a_closed_http_stream_ends_its_request(tiny_server: TritonServer, model_name: str) -> None:
    of_the_engine = {"input_ids": [5], "input_lengths": 1, "request_output_len": 390, "end_id": -1, "streaming": True}
    of_the_ensemble = {"text_input": "Hello", "max_tokens": 390, "end_id": -1, "stream": True}
    body = json.dumps(of_the_ensemble if model_name == "ensemble" else of_the_engine).encode()
    url = urllib.request.Request(f"{tiny_server.http_url}/v2/models/{model_name}/generate_stream", data=body)
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.readline().startswith(b"data:")
        assert gauge(tiny_server, "furcate_live_requests") == 1
    assert_idle_soon(tiny_server)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_killed_client_disturbs_nobody_and_its_stream_ends(tiny_server: TritonServer, scheme: str) -> None:
    server_url = tiny_server.grpc_url if scheme == "grpc" else tiny_server.http_url
    command = [sys.executable, "-m", "furcate.client.cli", "generate", "Hello", "--url", server_url]
    with Client(tiny_server.grpc_url, deadline_s=60) as client:
        alone = client.generate("Hello 🌳", max_tokens=60, end_id=-1)
        gone = subprocess.Popen([*command, "--max-tokens", "390"], stdout=subprocess.PIPE)
        assert gone.stdout is not None
        gone.stdout.read(1)
        gone.kill()
        gone.communicate()
        assert client.generate("Hello 🌳", max_tokens=60, end_id=-1).token_ids == alone.token_ids
    assert_idle_soon(tiny_server)


def test_a_single_answer_whose_http_client_leaves_runs_to_its_end(tiny_server: TritonServer) -> None:
    """Of this client Triton itself is not told; the front end takes the same request, and ends it (test_disconnect.py)."""
    body = json.dumps({"text_input": "Hello", "max_tokens": 200, "end_id": -1}).encode()
    head = f"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    port = tiny_server.ports.http
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)
        for _ in range(500):
            if gauge(tiny_server, "furcate_live_requests") == 1:
                break
            time.sleep(0.01)
    for _ in range(300):
        if gauge(tiny_server, "furcate_live_requests") == 0:
            break
        time.sleep(0.1)
    assert_idle_soon(tiny_server)


ASYNC_CALLER = """
import asyncio, sys
from furcate.client import AsyncClient

async def main(url):
    async with AsyncClient(url) as client:
        whole = await client.generate("Hello", max_tokens=20, end_id=-1)
        stream = client.stream("Hello", max_tokens=20, end_id=-1)
        assert "".join([delta.text async for delta in stream]) == whole.text == stream.generation.text
        task = asyncio.create_task(client.generate("Hello", max_tokens=390, end_id=-1))
        await asyncio.sleep(0.3)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            print("cancelled", whole.num_tokens)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_async_client_streams_and_cancels_with_its_task(scheme: str, tiny_server: TritonServer) -> None:
    url = tiny_server.grpc_url if scheme == "grpc" else tiny_server.http_url
    # A process of its own: gRPC's asyncio side wants one event loop for a process.
    done = subprocess.run([sys.executable, "-c", ASYNC_CALLER, url], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("cancelled 20\n", "")
    assert_idle_soon(tiny_server)
