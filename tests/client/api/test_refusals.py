"""What a wrong request is told: OpenAI's shape, the field by name, one sentence."""

import json

import httpx2
import openai
import pytest

pytestmark = pytest.mark.server

KEY = {"Authorization": "Bearer a-key-of-the-tests"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}


def post(url: str, path: str, body: object) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/{path}", json=body, headers=KEY, timeout=60, trust_env=False)


CASES = {
    "unknown field": ("chat/completions", {"colour": 1}, "Unknown field 'colour'; leave it out.", "colour"),
    "unknown field inside": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x", "mood": 1}]},
        "Unknown field 'messages.0.mood'; leave it out.",
        "messages.0.mood",
    ),
    "no messages": (
        "chat/completions",
        {"messages": []},
        "'messages' is []: List should have at least 1 item",
        "messages",
    ),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "'messages.0.content.0.type' is \"image_url\": Input should be 'text'.",
        "messages.0.content.0.type",
    ),
    "forced tool": (
        "chat/completions",
        {"tool_choice": "required"},
        "'tool_choice' cannot be used as asked",
        "tool_choice",
    ),
    "alternatives": (
        "chat/completions",
        {"logprobs": True, "top_logprobs": 2},
        "only the chosen tokens'",
        "top_logprobs",
    ),
    "alternatives of text": ("completions", {"logprobs": 2}, "only the chosen tokens'", "logprobs"),
    "audio": ("chat/completions", {"modalities": ["text", "audio"]}, "this model makes text only", "modalities"),
    "functions": ("chat/completions", {"functions": []}, "they were replaced by tools; send those.", "functions"),
    "temperature": (
        "completions",
        {"temperature": 3},
        "'temperature' is 3: Input should be less than or equal to 2.",
        "temperature",
    ),
    "temperature as text": (
        "completions",
        {"temperature": "1"},
        "'temperature' is \"1\": Input should be a valid number.",
        "temperature",
    ),
    "empty stop": (
        "completions",
        {"stop": ["a", ""]},
        "'stop.1' is \"\": String should have at least 1 character.",
        "stop.1",
    ),
    "bias of no token": (
        "completions",
        {"logit_bias": {"x": 1}},
        "'logit_bias.x' is 1: String should match pattern",
        "logit_bias.x",
    ),
    "bias beyond the vocabulary": ("completions", {"logit_bias": {"999": 1}}, "'logit_bias_ids' names token 999", None),
    "too many texts": (
        "completions",
        {"prompt": ["a"] * 20, "n": 2},
        "asks for 40 texts (prompts times n); 32 are allowed",
        "n",
    ),
    "echo of logprobs": ("completions", {"echo": True, "logprobs": 0}, "'echo' does not go with 'logprobs'", "echo"),
    "usage without stream": (
        "completions",
        {"stream_options": {"include_usage": True}},
        "'stream_options' goes with",
        "stream_options",
    ),
    "two limits": (
        "chat/completions",
        {"max_completion_tokens": 5},
        "its older name 'max_tokens' says 4",
        "max_tokens",
    ),
    "schema": (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
        "The json_schema guide cannot be followed",
        None,
    ),
    "min_tokens": (
        "completions",
        {"min_tokens": 9},
        "Min_tokens is 9; it must be from 0 to max_tokens, which is 4.",
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_request_gets_its_sentence(case: str, api_url: str) -> None:
    path, changes, sentence, param = CASES[case]
    answer = post(api_url, path, {**(CHAT if "chat" in path else TEXT), **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert sentence in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "\n" not in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_context_cannot_hold_has_openais_code(client: openai.OpenAI, is_stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 500, stream=is_stream)
    assert caught.value.code == "context_length_exceeded"
    assert "The prompt has 500 tokens and max_tokens is 16" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 500}], stream=is_stream
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "The body is not JSON: EOF while parsing a value"),
        (b"[1]", "The body is [1]; it must be a JSON object."),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "The body is not JSON"),
        (b"\xff\xfe", "The body is not JSON"),
        (b"[" * 100_000, "The body is not JSON: recursion limit exceeded"),
        (
            b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
            "'temperature' is NaN: Input should be a finite number.",
        ),
        (b'{"model": "tiny", "prompt": "a", "seed": 1' + b"0" * 100 + b"}", "'seed' is 1000"),
    ],
)
def test_a_body_that_is_no_request_gets_its_sentence(body: bytes, sentence: str, api_url: str) -> None:
    headers = {**KEY, "Content-Type": "application/json"}
    answer = httpx2.post(f"{api_url}/v1/completions", content=body, headers=headers, trust_env=False)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_an_unknown_model_path_and_method_are_named(client: openai.OpenAI, api_url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt' here; the model is 'tiny'") as caught:
        client.completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found"
    assert httpx2.get(f"{api_url}/v2", headers=KEY, trust_env=False).json()["error"]["message"] == (
        "There is nothing at '/v2'; see /openapi.json."
    )
    answer = httpx2.get(f"{api_url}/v1/completions", headers=KEY, trust_env=False)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "GET cannot be used on '/v1/completions'" in answer.json()["error"]["message"]


def test_a_form_that_a_web_page_could_send_unasked_is_refused(api_url: str) -> None:
    headers = {**KEY, "Content-Type": "text/plain"}
    answer = httpx2.post(f"{api_url}/v1/completions", content=json.dumps(TEXT), headers=headers, trust_env=False)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == "The Content-Type is 'text/plain'; it must be application/json."
