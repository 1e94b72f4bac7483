"""Chat templates and tokens, as the front end sees them."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from furcate.builder.errors import ConfigError
from furcate.client.api.chat import template_message
from furcate.client.api.chat_request import AssistantMessage
from furcate.client.api.errors import ApiError
from furcate.client.api.tokens import Tokens

TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokens(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokens]:
    directory = tmp_path_factory.mktemp("templates")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(directory)
    tokens = Tokens(directory)
    yield tokens
    tokens.close()


def test_tools_and_parsed_calls_reach_the_template(tokens: Tokens, tiny_target: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "yes"}'}}
    message = AssistantMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    tools = [{"type": "function", "function": {"name": "look"}}]
    ids = asyncio.run(tokens.chat_ids([template_message(message)], tools))
    assert ids == PreTrainedTokenizerFast.from_pretrained(tiny_target).encode("look;yes")


def test_what_a_template_refuses_is_the_requests_fault(tokens: Tokens) -> None:
    with pytest.raises(ApiError, match="The model's chat template refuses these messages: no system here") as caught:
        asyncio.run(tokens.chat_ids([{"role": "system", "content": "x"}], None))
    assert (caught.value.status, caught.value.body.error.param) == (400, "messages")


def test_a_piece_has_its_bytes_even_when_they_are_no_text(tokens: Tokens, tiny_target: Path) -> None:
    ids = PreTrainedTokenizerFast.from_pretrained(tiny_target).encode("é")
    assert [tokens.piece(token).content for token in ids] == [b"\xc3", b"\xa9"]
    assert tokens.piece(1).text == "</s>"


def test_a_token_outside_the_vocabulary_is_refused(tokens: Tokens) -> None:
    with pytest.raises(ApiError, match="'prompt' names token 258; the vocabulary's tokens are 0 to 257"):
        asyncio.run(tokens.text_of([1, 258]))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="No tokenizer can be read in"):
        Tokens(tmp_path)
    shutil.copy(tiny_target / "tokenizer_config.json", tmp_path)
    with pytest.raises(ConfigError, match="No tokenizer can be read in"):
        Tokens(tmp_path)
