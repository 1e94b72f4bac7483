"""/v1/completions: prompts gone on with, as they stand."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from furcate.client.api.answers import Completion, CompletionChoice, CompletionLogprobs, FinishReason, Usage
from furcate.client.api.backend import Backend
from furcate.client.api.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from furcate.client.api.errors import ApiError
from furcate.client.api.logprobs import CompletionOffsets, joined
from furcate.client.api.sampling import options_of, seed_of
from furcate.client.api.settings import MAX_CHOICES
from furcate.client.api.texts import Piece, Texts, opened


class CompletionAnswer:
    """The answer to one request, whole or as events. Choice numbers run through the prompts, n for each."""

    def __init__(self, request: CompletionRequest, backend: Backend) -> None:
        self._request = request
        self._backend = backend
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._echoes: list[str] = []
        self._offsets: list[CompletionOffsets] = []

    async def whole(self) -> Completion:
        """All choices, complete."""
        texts = await self._texts()
        pieces: list[list[Piece]] = [[] for _ in self._echoes]
        async for piece in texts.pieces():
            pieces[piece.index].append(piece)
        return self._completion([self._choice(index, each) for index, each in enumerate(pieces)], texts.usage)

    async def events(self) -> AsyncIterator[str]:
        """One JSON text for each piece; the usage last, when asked for."""
        texts = await self._texts()
        pieces = texts.pieces()
        try:
            for index, echo in enumerate(self._echoes):
                if echo:
                    yield self._event(index, echo, None, None)
            async for piece in pieces:
                yield self._event(
                    piece.index, piece.delta.text, self._logprobs(piece.index, [piece]), piece.finish_reason
                )
            if self._request.includes_usage:
                yield self._completion([], texts.usage).model_dump_json()
        finally:
            await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def _texts(self) -> Texts:
        request = self._request
        num_choices = len(request.prompts) * request.num_choices
        if num_choices > MAX_CHOICES:
            raise ApiError(
                400,
                f"The request asks for {num_choices} texts (prompts times n); {MAX_CHOICES} are allowed.",
                param="n",
            )
        if request.echo and request.logprobs is not None:
            raise ApiError(
                400, "'echo' does not go with 'logprobs': the prompt's tokens have none; leave one out.", param="echo"
            )
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        options = {
            **options_of(request, max_tokens=max_tokens),
            "return_log_probs": request.logprobs is not None,
        }
        prompts: list[tuple[str, dict[str, Any]]] = []
        for prompt in request.prompts:
            self._echoes += [await self._text_of(prompt) if request.echo else ""] * request.num_choices
            text, more = (prompt, {}) if isinstance(prompt, str) else ("", {"prompt_ids": prompt})
            for _ in range(request.num_choices):
                prompts.append((text, {**options, **more, "seed": seed_of(request.seed, len(prompts))}))
        self._offsets = [CompletionOffsets(self._backend.tokens, start=len(echo)) for echo in self._echoes]
        return opened(self._backend.client, prompts, num_choices=request.num_choices)

    async def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await self._backend.tokens.text_of(prompt)

    def _choice(self, index: int, pieces: list[Piece]) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echoes[index] + "".join(piece.delta.text for piece in pieces),
            logprobs=self._logprobs(index, pieces),
            finish_reason=pieces[-1].finish_reason,
        )

    def _logprobs(self, index: int, pieces: list[Piece]) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        return joined([self._offsets[index].logprobs(piece.delta) for piece in pieces])

    def _event(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, finish_reason: FinishReason | None
    ) -> str:
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        exclude = None if self._request.includes_usage else {"usage"}
        return self._completion([choice], None).model_dump_json(exclude=exclude)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._request.model, choices=choices, usage=usage)
