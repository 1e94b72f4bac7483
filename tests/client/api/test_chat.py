"""/v1/chat/completions with OpenAI's own client, against the library's answers for the same prompt."""

import json
from pathlib import Path

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from furcate.client import Client
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

HELLO = [{"role": "user", "content": "Hello"}]


def ask(client: openai.OpenAI, **changes):
    return client.chat.completions.create(model="tiny", **{"messages": HELLO, "temperature": 0, **changes})


@pytest.fixture(scope="module")
def library(tiny_server: TritonServer):
    with Client(tiny_server.grpc_url) as client:
        yield client


def test_an_answer_is_the_ensembles_through_the_chat_template(client: openai.OpenAI, library: Client) -> None:
    same = library.generate("Hello", max_tokens=20, chat=True)
    answer = ask(client, max_completion_tokens=20)
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", same.text)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == same.stats.num_prompt_tokens == 7  # the template adds <s> and </s>
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 27)


def test_a_stream_is_the_same_text_with_role_reason_and_usage(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=20)
    chunks = list(ask(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len(chunks) > 5
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    quiet = list(ask(client, max_tokens=20, stream=True))
    assert all("usage" not in chunk.to_dict() for chunk in quiet)
    assert quiet[-1].choices[0].finish_reason == "length"


def test_what_names_no_limit_gets_the_configured_one_or_what_the_context_leaves(client: openai.OpenAI) -> None:
    assert ask(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 24
    long = [{"role": "user", "content": "x" * 390}]
    assert ask(client, messages=long, extra_body={"ignore_eos": True}).usage.total_tokens == 400


def test_choices_have_seeds_of_their_own_and_repeat(client: openai.OpenAI) -> None:
    def texts(**options) -> list[str]:
        return [
            choice.message.content for choice in ask(client, max_tokens=12, temperature=1.0, seed=5, **options).choices
        ]

    three = texts(n=3)
    assert three == texts(n=3)
    assert len(set(three)) == 3
    assert texts() == three[:1]
    assert texts(n=2) == three[:2]
    chunks = ask(client, max_tokens=12, temperature=1.0, seed=5, n=3, stream=True)
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == three


def test_a_negative_seed_is_one_too(client: openai.OpenAI) -> None:
    first, again = (ask(client, max_tokens=8, temperature=1.0, seed=-1).choices[0].message.content for _ in range(2))
    assert first == again


def test_temperature_is_one_when_nothing_is_said(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    silent = create(model="tiny", messages=HELLO, max_tokens=12, seed=5)
    assert (
        silent.choices[0].message.content
        == ask(client, max_tokens=12, seed=5, temperature=1).choices[0].message.content
    )
    assert silent.choices[0].message.content != ask(client, max_tokens=12).choices[0].message.content


def test_no_probability_for_others_is_greedy(client: openai.OpenAI) -> None:
    greedy = ask(client, max_tokens=12).choices[0].message.content
    assert ask(client, max_tokens=12, temperature=1.5, top_p=0).choices[0].message.content == greedy
    assert ask(client, max_tokens=12, temperature=1.5, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert ask(client, max_tokens=12, temperature=1.5, extra_body={"min_p": 1.0}).choices[0].message.content == greedy


@pytest.mark.parametrize("is_list", [False, True])
def test_stop_ends_the_text_before_itself(client: openai.OpenAI, is_list: bool) -> None:
    whole = ask(client, max_tokens=20).choices[0].message.content
    stop = whole[4:6]
    answer = ask(client, max_tokens=20, stop=[stop, "not in it"] if is_list else stop).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


def test_log_probabilities_are_the_chosen_tokens(client: openai.OpenAI, library: Client) -> None:
    same = library.generate("Hello", max_tokens=10, chat=True, return_log_probs=True)
    whole = ask(client, max_tokens=10, logprobs=True, top_logprobs=0).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert [each.logprob for each in content] == list(same.log_probs)
    assert bytes(byte for each in content for byte in each.bytes or ()).decode(errors="replace") == same.text
    assert all(each.top_logprobs == [] for each in content)
    chunks = ask(client, max_tokens=10, logprobs=True, stream=True)
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert streamed == content


def test_penalties_and_biases_reach_the_model(client: openai.OpenAI, library: Client) -> None:
    given = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    same = library.generate("Hello", max_tokens=24, chat=True, repetition_penalty=1.3, **given)
    answer = ask(client, max_tokens=24, extra_body={"repetition_penalty": 1.3}, **given).choices[0].message.content
    assert answer == same.text != ask(client, max_tokens=24).choices[0].message.content
    forced = ask(client, max_tokens=5, logit_bias={"40": 100}, logprobs=True).choices[0]
    assert [each.token for each in forced.logprobs.content] == [each.token for each in forced.logprobs.content[:1]] * 5


def test_a_response_format_holds_the_text_to_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "ok": {"type": "boolean"}},
        "required": ["size", "ok"],
        "additionalProperties": False,
    }
    given = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    answer = ask(client, max_tokens=300, response_format=given).choices[0]
    assert answer.finish_reason == "stop"
    assert json.loads(answer.message.content).keys() == {"size", "ok"}
    anything = ask(client, max_tokens=2, response_format={"type": "json_object"}).choices[0].message.content
    assert anything.lstrip().startswith("{")


def test_messages_go_through_the_template_whole(client: openai.OpenAI, tiny_target: Path) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts, "name": "me"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target)
    text = "<s>Be short.</s><s>Hello\nthere</s><s></s><s>2</s>"
    prompt_tokens = len(tokenizer.encode(text))
    assert ask(client, messages=messages, tools=tools, max_tokens=2).usage.prompt_tokens == prompt_tokens
