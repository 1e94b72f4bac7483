"""The request format of Triton's own OpenAI front end (server repository, python/openai, `_create_trtllm_generate_request` of
release 26.09), reproduced field by field, against the tables and the served repository."""

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from furcate.client import Client
from furcate.client.server import TritonServer
from furcate.model_repository.tables import ENSEMBLE

PROMPT = "Hello"
SCHEMA = (
    '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
)


def strings(*values: str) -> np.ndarray:
    """[[...]], as the front end makes them."""
    return np.array([[value.encode() for value in values]], dtype=np.object_)


REQUEST: dict[str, np.ndarray] = {
    "text_input": strings(PROMPT),
    "stream": np.bool_([[False]]),
    "max_tokens": np.int32([[20]]),
    "stop_words": strings("a stop", "another"),
    "top_p": np.float32([[0.9]]),
    "frequency_penalty": np.float32([[0.5]]),
    "presence_penalty": np.float32([[0.25]]),
    "seed": np.uint64([[7]]),
    "temperature": np.float32([[0.8]]),
    "exclude_input_in_output": np.bool_([[True]]),
    "return_num_input_tokens": np.bool_([[True]]),
    "return_num_output_tokens": np.bool_([[True]]),
}
"""All that it sends for a text; `exclude_input_in_output` is its "echo", found by that name among the model's inputs."""
FORCED_TOOL = {"guided_decoding_guide_type": strings("json_schema"), "guided_decoding_guide": strings(SCHEMA)}
"""What it adds for a tool that must be called: the tool's own parameters."""
ADAPTER = {"lora_task_id": np.uint64([[1]])}
"""What it adds for a LoRA adapter, which this server refuses."""


@pytest.mark.parametrize("name", [*REQUEST, *FORCED_TOOL, *ADAPTER])
def test_every_field_is_an_input_of_that_type_and_shape(name: str) -> None:
    value = {**REQUEST, **FORCED_TOOL, **ADAPTER}[name]
    field = next(field for field in ENSEMBLE.inputs if field.name == name)
    assert field.dtype == {"BYTES": "STRING"}.get(np_to_triton_dtype(value.dtype), np_to_triton_dtype(value.dtype))
    assert value.ndim == 2
    assert value.shape[0] == 1
    assert field.shape in ((1,), (-1,))
    assert field.shape == (-1,) or value.shape == (1, 1)


def responses_to(server: TritonServer, inputs: dict[str, np.ndarray]) -> list[Any]:
    """All responses of the ensemble to these tensors, as NVIDIA's client gives them."""
    answers: list[Any] = []
    with triton.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        tensors = [
            triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
            for name, array in inputs.items()
        ]
        client.async_stream_infer("ensemble", tensors)
        client.stop_stream()
    assert [error for _, error in answers if error is not None] == []
    return [result for result, _ in answers]


def text_of(responses: list[Any]) -> str:
    """The text, read as the front end does: each response holds exactly one string."""
    texts = [response.as_numpy("text_output") for response in responses]
    assert {text.size for text in texts} == {1}
    return "".join(text.reshape(-1)[0].decode() for text in texts)


@pytest.mark.server
def test_the_model_shows_what_the_front_end_looks_for(tiny_server: TritonServer) -> None:
    with triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://")) as client:
        config = client.get_model_config("ensemble", as_json=True)["config"]
    assert config["platform"] == "ensemble"  # it then sends this format, not vLLM's
    assert config["model_transaction_policy"]["decoupled"] is True
    assert "exclude_input_in_output" in {each["name"] for each in config["input"]}


@pytest.mark.server
@pytest.mark.parametrize("is_streaming", [False, True])
def test_the_served_ensemble_answers_it(tiny_server: TritonServer, is_streaming: bool) -> None:
    responses = responses_to(tiny_server, {**REQUEST, "stream": np.bool_([[is_streaming]])})
    with Client(tiny_server.grpc_url) as client:
        same = client.generate(
            PROMPT, max_tokens=20, temperature=0.8, top_p=0.9, seed=7, frequency_penalty=0.5, presence_penalty=0.25
        )
    assert text_of(responses) == same.text
    assert (len(responses) > 3) if is_streaming else (len(responses) == 1)
    counts = {name: [each.as_numpy(name) for each in responses] for name in ("num_input_tokens", "num_output_tokens")}
    assert {array.dtype for arrays in counts.values() for array in arrays} == {np.dtype(np.int32)}
    # Its usage: the first response's input tokens, and the sum of all responses' output tokens.
    assert counts["num_input_tokens"][0].item() == same.stats.num_prompt_tokens
    assert sum(array.item() for array in counts["num_output_tokens"]) == same.num_tokens


@pytest.mark.server
def test_a_forced_tool_gives_its_arguments(tiny_server: TritonServer) -> None:
    request = {**REQUEST, **FORCED_TOOL, "max_tokens": np.int32([[300]]), "stop_words": strings("no stop")}
    assert json.loads(text_of(responses_to(tiny_server, request))).keys() == {"ok"}


@pytest.mark.server
def test_echo_puts_the_prompt_in_front(tiny_server: TritonServer) -> None:
    request = {**REQUEST, "exclude_input_in_output": np.bool_([[False]])}
    assert text_of(responses_to(tiny_server, request)) == PROMPT + text_of(responses_to(tiny_server, REQUEST))
