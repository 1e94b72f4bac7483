"""Texts through the whole ensemble: characters, stop words, chat template, prompt, and the old clients' requests."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from transformers import PreTrainedTokenizerFast
from tritonclient.utils import np_to_triton_dtype

from furcate.client import Client
from furcate.client.server import TritonServer
from furcate.decoding.request import FinishReason

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def client(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url, deadline_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_engine: Callable[..., Path]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_engine("eagle3") / "tokenizer")


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_is_the_tokenizers_text_of_the_tokens(
    seed: int, client: Client, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A random model's bytes are full of broken and whole multi-byte characters."""
    stream = client.stream("日本語 🌳", max_tokens=60, temperature=1.2, seed=seed, end_id=-1)
    text = "".join(delta.text for delta in stream)
    assert text == tokenizer.decode(stream.generation.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_stop_word_ends_the_text_before_itself(is_streaming: bool, client: Client) -> None:
    free = client.generate("Hello", max_tokens=60, end_id=-1)
    stop = next(free.text[i : i + 2] for i in range(8, 40) if free.text[i : i + 2].isascii())
    if is_streaming:
        stream = client.stream("Hello", max_tokens=60, end_id=-1, stop=["never said", stop])
        assert not any(stop in delta.text for delta in stream)
        ended = stream.generation
    else:
        ended = client.generate("Hello", max_tokens=60, end_id=-1, stop=["never said", stop])
    assert ended.finish_reason is FinishReason.STOP
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.num_tokens < free.num_tokens


def test_end_id_ends_a_stream_inside_what_a_step_gave(client: Client) -> None:
    free = client.generate("Hello", max_tokens=30, end_id=-1)
    end_id = free.token_ids[12]
    index = free.token_ids.index(end_id)
    stream = client.stream("Hello", max_tokens=30, end_id=end_id)
    for _ in stream:
        pass
    assert stream.generation.token_ids == free.token_ids[: index + 1]
    assert stream.generation.finish_reason is FinishReason.END_ID


def test_chat_template_is_applied_on_the_server(client: Client) -> None:
    templated = client.generate("Hello", max_tokens=12, chat=True)
    by_hand = client.generate("<s>Hello</s>", max_tokens=12)
    assert templated.token_ids == by_hand.token_ids
    assert templated.stats.num_prompt_tokens == 7


def test_prompt_is_repeated_only_when_asked_for(client: Client) -> None:
    bare = client.generate("Hello 🌳", max_tokens=12)
    whole = client.generate("Hello 🌳", max_tokens=12, exclude_input_in_output=False)
    assert whole.text == "Hello 🌳" + bare.text
    assert whole.num_tokens == bare.num_tokens == 12


OLD_CLIENT_INPUTS = {
    "text_input": np.array([[b"Hello"]], np.object_),
    "max_tokens": np.array([[10]], np.int32),
    "bad_words": np.array([[b""]], np.object_),
    "stop_words": np.array([[b""]], np.object_),
    "stream": np.array([[True]]),
    "beam_width": np.array([[1]], np.int32),
    "top_k": np.array([[1]], np.int32),
    "top_p": np.array([[0.0]], np.float32),
    "temperature": np.array([[1.0]], np.float32),
    "length_penalty": np.array([[1.0]], np.float32),
    "repetition_penalty": np.array([[1.0]], np.float32),
    "random_seed": np.array([[0]], np.uint64),
    "return_log_probs": np.array([[False]]),
    "pad_id": np.array([[0]], np.int32),
    "end_id": np.array([[1]], np.int32),
}
"""What the old ensemble's end-to-end client sends unless told otherwise."""


def test_the_old_clients_request_works_unchanged(client: Client, tiny_server: TritonServer) -> None:
    texts: list[str] = []
    with triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://")) as old:
        answers: list = []
        old.start_stream(lambda result, error: answers.append((result, error)))
        tensors = [
            triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
            for name, array in OLD_CLIENT_INPUTS.items()
        ]
        old.async_stream_infer("ensemble", tensors, request_id="1")
        old.stop_stream()
    for result, error in answers:
        assert error is None
        texts.append(result.as_numpy("text_output").reshape(-1)[0].decode())
    assert "".join(texts) == client.generate("Hello", max_tokens=10).text


@pytest.mark.parametrize("said", [{}, {"stream": False}], ids=["nothing-said", "stream-false"])
def test_generate_gives_exactly_one_json_object(said: dict[str, bool], tiny_server: TritonServer) -> None:
    body = json.dumps({"text_input": "Hello", "max_tokens": 10, "bad_words": "", "stop_words": ""} | said).encode()
    with urllib.request.urlopen(f"{tiny_server.http_url}/v2/models/ensemble/generate", data=body) as answer:
        values = json.loads(answer.read())
    assert values["model_name"] == "ensemble"
    assert values["num_output_tokens"] == 10
    assert isinstance(values["text_output"], str)
