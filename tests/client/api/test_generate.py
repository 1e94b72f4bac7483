"""Triton's generate extension on the front end: the answers of Triton's own port, behind keys and limits."""

import json
from collections.abc import Iterator

import httpx2
import pytest
from served_gauges import is_idle_soon

from furcate.builder.errors import RequestError
from furcate.client.api.errors import ApiError
from furcate.client.api.generate import answer_schema, read_generate, request_schema
from furcate.client.server import TritonServer
from furcate.model_repository.tables import ENSEMBLE

GENERATE = "/v2/models/ensemble/generate"
BODY = {"text_input": "Hello", "max_tokens": 12, "end_id": -1}
LIKE_THE_OLD_ENSEMBLE = {"text_input": "Hello", "max_tokens": 20, "bad_words": "", "stop_words": "", "top_p": 0.0}
OF_ITS_OWN_TIME = ("_time_ns", "kv_cache_")
"""Outputs that differ from one answer to the next: when, and how many pages an earlier one left."""


@pytest.fixture
def http(api_url: str) -> Iterator[httpx2.Client]:
    headers = {"Authorization": "Bearer a-key-of-the-tests"}
    with httpx2.Client(base_url=api_url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def lasting(answer: dict) -> dict:
    return {name: value for name, value in answer.items() if not any(part in name for part in OF_ITS_OWN_TIME)}


def events_of(text: str) -> list[dict]:
    assert all(line.startswith("data: ") for line in text.splitlines() if line)
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


@pytest.mark.server
@pytest.mark.parametrize(
    "body",
    [
        BODY,
        LIKE_THE_OLD_ENSEMBLE,
        {**BODY, "max_tokens": [12], "stop_words": ["x", "yz"], "temperature": 0.8, "random_seed": 2**64 - 1},
        {**BODY, "return_log_probs": True, "exclude_input_in_output": True},
        {**BODY, "parameters": {"priority_level": 2, "timeout": 30_000_000}},
        {**BODY, "id": "mine"},
    ],
)
def test_an_answer_is_what_tritons_own_port_gives(http: httpx2.Client, tiny_server: TritonServer, body: dict) -> None:
    expected = httpx2.post(f"{tiny_server.http_url}{GENERATE}", json=body, timeout=60, trust_env=False).json()
    answer = http.post(GENERATE, json=body)
    assert answer.status_code == 200
    assert lasting(answer.json()) == lasting(expected)


@pytest.mark.server
def test_a_stream_is_the_answer_in_pieces_and_ends_without_a_word(http: httpx2.Client) -> None:
    whole = http.post(GENERATE, json={**BODY, "exclude_input_in_output": True}).json()
    answer = http.post(f"{GENERATE}_stream", json={**BODY, "stream": True, "id": "mine"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert all(event["id"] == "mine" for event in events)
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["length"]
    gathered = {**BODY, "stream": True, "parameters": {"response_interval_ms": 60_000}}
    (only,) = events_of(http.post(f"{GENERATE}_stream", json=gathered).text)
    assert only["text_output"] == whole["text_output"]


REFUSED = [
    ({**BODY, "top_q": 1}, "Unknown field 'top_q'; leave it out."),
    ({"max_tokens": 3}, "'text_input' is missing: The prompt."),
    ({"text_input": "Hello"}, "'max_tokens' is missing: How many tokens to generate at most."),
    ({**BODY, "beam_width": 4}, "'beam_width' cannot be used: beam search is not supported; send 1."),
    (
        {**BODY, "prompt_embedding_table": [[0.5]]},
        "'prompt_embedding_table' cannot be used: prompt embedding tables are not supported; send the prompt as text.",
    ),
    ({**BODY, "max_tokens": "3"}, "'max_tokens' is '3', which is no INT32 value."),
    ({**BODY, "max_tokens": True}, "'max_tokens' is True, which is no INT32 value."),
    ({**BODY, "max_tokens": 10**30}, f"'max_tokens' is {10**30}, which is no INT32 value."),
    ({**BODY, "max_tokens": None}, "'max_tokens' is None, which is no INT32 value."),
    ({**BODY, "max_tokens": [1, 2]}, "'max_tokens' has shape [1, 2], but its shape must be [1, 1]."),
    ({**BODY, "text_input": 5}, "'text_input' is 5, which is no STRING value."),
    ({**BODY, "text_input": {"a": 1}}, "'text_input' is {'a': 1}, which is no STRING value."),
    ({**BODY, "text_input": [["a"]]}, "'text_input' is [['a']], which is no STRING value."),
    ({**BODY, "return_log_probs": 1}, "'return_log_probs' is 1, which is no BOOL value."),
    ({**BODY, "temperature": 1e39}, "'temperature' is 1e+39, which is no FP32 value."),
    ({**BODY, "temperature": float("nan")}, "'temperature' is nan, which is no FP32 value."),
    ({**BODY, "stream": True}, "'stream' is true; use generate_stream."),
    ({**BODY, "id": 3}, "'id' is no string."),
    ({**BODY, "parameters": 3}, "'parameters' is no object."),
    (
        {**BODY, "parameters": {"x": 1}},
        "'parameters' has 'x'; it may have: priority_level, timeout, response_interval_ms.",
    ),
    ({**BODY, "parameters": {"timeout": 0.5}}, "'timeout' is no whole number."),
    ([BODY], f"The body is {json.dumps([BODY], separators=(',', ':'))}; it must be a JSON object."),
]


@pytest.mark.parametrize(("body", "sentence"), REFUSED)
def test_what_cannot_be_asked_is_refused_by_name(body: object, sentence: str) -> None:
    with pytest.raises((ApiError, RequestError)) as caught:
        read_generate(json.dumps(body).encode(), is_streaming=False)
    assert str(caught.value) == sentence


@pytest.mark.server
def test_errors_have_tritons_shape_wherever_they_arise(http: httpx2.Client, tiny_server: TritonServer) -> None:
    def refused(status: int, path: str = GENERATE, **options) -> str:
        answer = http.post(path, **options)
        assert answer.status_code == status
        (sentence,) = answer.json().values()
        assert list(answer.json()) == ["error"] and isinstance(sentence, str)
        return sentence

    assert "Unknown field 'top_q'" in refused(400, json={**BODY, "top_q": 1})
    assert "no JSON" not in refused(400, content=b"{", headers={"Content-Type": "application/json"})
    assert "it must be application/json" in refused(415, content=json.dumps(BODY))
    assert "The API key is missing or wrong" in refused(401, json=BODY, headers={"Authorization": "Bearer x"})
    assert "send a shorter one" in refused(413, json={**BODY, "text_input": "x" * 5_000_000})
    assert "There is nothing at" in refused(404, "/v2/models/other/generate", json=BODY)
    # What only the engine knows, whole and as a stream that has not begun.
    for path in (GENERATE, f"{GENERATE}_stream"):
        assert "Temperature is -1.0" in refused(400, path, json={**BODY, "temperature": -1.0})
        assert "limit is" in refused(400, path, json={**BODY, "max_tokens": 100_000})
    assert is_idle_soon(tiny_server)


def test_the_schemas_have_all_that_the_ensemble_takes_and_gives() -> None:
    for is_streaming in (False, True):
        schema = request_schema(is_streaming=is_streaming)
        usable = {each.name for each in ENSEMBLE.inputs if each.refusal is None or each.neutral}
        assert schema["properties"].keys() - {"id", "parameters"} == usable
        assert set(schema["required"]) == {"text_input", "max_tokens"}
    assert {each.name for each in ENSEMBLE.outputs} < answer_schema()["properties"].keys()
