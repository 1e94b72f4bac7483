"""The target's tokenizer, for what only the front end can do: chat templates, and the tokens behind a text."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from furcate.builder.errors import ConfigError
from furcate.client.api.errors import ApiError
from furcate.model_repository.served_engine import tokenizer_in
from furcate.model_repository.text_stream import TokenText


@dataclass(frozen=True, kw_only=True)
class TokenPiece:
    """One token's own text and bytes; a token that holds a part of a character has bytes that are no text by themselves."""

    text: str
    content: bytes


class Tokens:
    """A tokenizer, used from an event loop without holding it up."""

    def __init__(self, directory: Path) -> None:
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer: Any = tokenizer_in(directory)
        except (OSError, ValueError) as error:
            raise ConfigError(f"No tokenizer can be read in '{directory}' ({type(error).__name__}).") from None
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"The tokenizer in '{directory}' is not a fast one (tokenizer.json); the front end needs that."
            )
        self._bytes_of = from_tokenizer(self._tokenizer).decode_bytes
        self.piece = lru_cache(maxsize=65536)(self._piece)
        # One thread: a fast tokenizer must not be used by two at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[int]:
        """The prompt's tokens, through the model's chat template; ApiError when the template will not have them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._chat_ids, messages, tools)

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; ApiError when one is not in the vocabulary."""
        highest = len(self._tokenizer) - 1
        if max(token_ids) > highest:
            raise ApiError(
                400,
                f"'prompt' names token {max(token_ids)}; the vocabulary's tokens are 0 to {highest}.",
                param="prompt",
            )
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenizer.decode, list(token_ids))

    def text_stream(self) -> TokenText:
        """Turns tokens into text one at a time, as the server does."""
        return TokenText(self._tokenizer)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _piece(self, token_id: int) -> TokenPiece:
        content = self._bytes_of([token_id])
        return TokenPiece(text=content.decode(errors="replace"), content=content)

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ApiError(400, "This model has no chat template; use /v1/completions.", code="no_chat_template")
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, return_dict=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ApiError(
                400, f"The model's chat template refuses these messages: {str(error)[:200]}.", param="messages"
            ) from None
        return encoded["input_ids"]
