"""/v1/completions with OpenAI's own client, against the library's answers for the same prompt."""

from collections.abc import Iterator

import openai
import pytest

from furcate.client import Client
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def library(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url) as client:
        yield client


def ask(client: openai.OpenAI, **changes):
    return client.completions.create(model="tiny", **{"prompt": "Hello", "temperature": 0, **changes})


def test_an_answer_is_the_ensembles(client: openai.OpenAI, library: Client) -> None:
    same = library.generate("Hello", max_tokens=16, end_id=-1)
    answer = ask(client, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (same.text, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)  # 16 is OpenAI's own default


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=20)
    chunks = list(ask(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_a_prompt_of_tokens_is_the_same_prompt(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=12).choices[0].text
    ids = [2 + 39, 2 + 68, 2 + 75, 2 + 75, 2 + 78]  # the tiny tokenizer's numbers of H, e, l, l, o
    assert ask(client, max_tokens=12, prompt=ids).choices[0].text == text
    assert [choice.text for choice in ask(client, max_tokens=12, prompt=[ids, ids]).choices] == [text, text]
    assert ask(client, max_tokens=12, prompt=ids, echo=True).choices[0].text == f"Hello{text}"


def test_prompts_and_choices_are_numbered_through(client: openai.OpenAI) -> None:
    both = ask(client, prompt=["Hello", "Good day"], n=2, temperature=1, seed=3, max_tokens=8)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in both.choices}) == 4
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (5 + 8, 32)
    first = ask(client, prompt="Hello", n=2, temperature=1, seed=3, max_tokens=8)
    assert [choice.text for choice in first.choices] == [choice.text for choice in both.choices[:2]]


def test_log_probabilities_have_their_places_in_the_text(client: openai.OpenAI, library: Client) -> None:
    same = library.generate("Hello", max_tokens=12, return_log_probs=True)
    choice = ask(client, max_tokens=12, logprobs=0).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == list(same.log_probs)
    assert choice.logprobs.top_logprobs is None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert len(tokens) == len(offsets) == 12
    # A part of a character is no text by itself; the end token and numbers beyond the tokenizer are not shown.
    hidden = ("\N{REPLACEMENT CHARACTER}", "</s>", "<[")
    whole = [pair for pair in zip(tokens, offsets, strict=True) if not any(each in pair[0] for each in hidden)]
    assert len(whole) > 3
    assert all(choice.text[offset : offset + len(token)] == token for token, offset in whole)
    chunks = list(ask(client, max_tokens=12, logprobs=0, stream=True))
    assert [value for chunk in chunks for value in chunk.choices[0].logprobs.text_offset] == offsets


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=8).choices[0].text
    assert ask(client, max_tokens=8, echo=True).choices[0].text == f"Hello{text}"
    chunks = list(ask(client, max_tokens=8, echo=True, stream=True))
    assert chunks[0].choices[0].text == "Hello"
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"Hello{text}"
