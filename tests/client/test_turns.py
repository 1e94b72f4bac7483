"""What a request says of its turn reaches the engine through the ensemble, and what it reuses comes back."""

import json
import queue
import subprocess
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as triton
from served_command import FURCATE
from tritonclient.utils import np_to_triton_dtype

from furcate.builder.errors import RequestError
from furcate.client import Client
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

TIMED_OUT = "Timed out: the request's 0.001 s were over after"


def generate(server: TritonServer, **body: object) -> dict[str, object]:
    """The answer of HTTP's generate; an error's is its body too."""
    data = json.dumps({"text_input": "Hello", "end_id": -1, **body}).encode()
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/models/ensemble/generate", data=data, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def test_a_timeout_over_http_ends_the_request_with_one_sentence(tiny_server: TritonServer) -> None:
    answer = generate(tiny_server, max_tokens=390, parameters={"timeout": 1000})
    assert TIMED_OUT in str(answer["error"])
    assert "\n" not in str(answer["error"])


def test_a_timeout_over_grpc_is_triton_s_own_field(tiny_server: TritonServer) -> None:
    arrays = {"text_input": np.array([[b"Hello"]], np.object_), "max_tokens": np.array([[390]], np.int32)}
    inputs = [
        triton.InferInput(name, [1, 1], np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        for name, array in arrays.items()
    ]
    answers: queue.Queue[object] = queue.Queue()
    with triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("ensemble", inputs, timeout=1000)
        assert TIMED_OUT in str(answers.get(timeout=60))
        client.stop_stream()


def test_a_priority_is_taken_or_refused(tiny_server: TritonServer) -> None:
    assert "error" not in generate(tiny_server, max_tokens=2, parameters={"priority_level": 5})
    answer = generate(tiny_server, max_tokens=2, parameters={"priority_level": 500})
    assert "priority is 500; it must be from -100 to 100" in str(answer["error"])


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_client_s_options_reach_the_engine(scheme: str, tiny_server: TritonServer) -> None:
    url = tiny_server.grpc_url if scheme == "grpc" else tiny_server.http_url
    with Client(url, deadline_s=60) as client:
        usual = client.generate("Hello", max_tokens=4)
        assert client.generate("Hello", max_tokens=4, priority=5, timeout_s=60).token_ids == usual.token_ids
        for call in (client.generate, lambda *prompt, **options: list(client.stream(*prompt, **options))):
            with pytest.raises(RequestError, match=TIMED_OUT):
                call("Hello", max_tokens=390, end_id=-1, timeout_s=0.001)
            with pytest.raises(RequestError, match="priority is -101; it must be from -100 to 100"):
                call("Hello", priority=-101)


def test_the_command_s_options_reach_the_engine(tiny_server: TritonServer) -> None:
    command = [*FURCATE, "generate", "Hello", "--url", tiny_server.grpc_url, "--max-tokens", "300"]
    for options, message in {("--timeout-s", "0.001"): TIMED_OUT, ("--priority", "101"): "priority is 101;"}.items():
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert message in done.stderr


def test_the_same_prompt_again_reuses_its_pages_and_says_the_same(tiny_server: TritonServer) -> None:
    prompt = "A prompt of more than three pages, which hold sixteen tokens each."
    first, second = (generate(tiny_server, text_input=prompt, max_tokens=20) for _ in range(2))
    assert second["text_output"] == first["text_output"]
    assert second["kv_cache_reused_blocks"] == (len(prompt) - 1) // 16
    assert second["kv_cache_alloc_total_blocks"] == first["kv_cache_alloc_total_blocks"]
