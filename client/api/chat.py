"""/v1/chat/completions: messages through the model's chat template, texts as messages."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from furcate.client.api.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    Usage,
)
from furcate.client.api.backend import Backend
from furcate.client.api.chat_request import AssistantMessage, ChatRequest, Content, Message
from furcate.client.api.logprobs import chat_logprobs
from furcate.client.api.sampling import guide_of, max_tokens_of, options_of, seed_of
from furcate.client.api.texts import Piece, Texts, opened
from furcate.client.results import Delta


class ChatAnswer:
    """The answer to one request, whole or as events."""

    def __init__(self, request: ChatRequest, backend: Backend) -> None:
        self._request = request
        self._backend = backend
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> ChatCompletion:
        """All choices, complete."""
        texts = await self._texts()
        pieces: list[list[Piece]] = [[] for _ in range(self._request.num_choices)]
        async for piece in texts.pieces():
            pieces[piece.index].append(piece)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[self._choice(index, each) for index, each in enumerate(pieces)],
            usage=texts.usage,
        )

    async def events(self) -> AsyncIterator[str]:
        """One JSON text for each piece; the usage last, when asked for."""
        texts = await self._texts()
        begun: set[int] = set()
        pieces = texts.pieces()
        try:
            async for piece in pieces:
                if piece.index not in begun:
                    begun.add(piece.index)
                    yield self._event(piece.index, ChatDelta(role="assistant", content=""), None, None)
                if piece.delta.text or piece.delta.token_ids:
                    yield self._event(
                        piece.index, ChatDelta(content=piece.delta.text), self._logprobs(piece.delta), None
                    )
                if piece.finish_reason is not None:
                    yield self._event(piece.index, ChatDelta(), None, piece.finish_reason)
            if self._request.includes_usage:
                yield self._chunk([], texts.usage)
        finally:
            await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def _texts(self) -> Texts:
        request, settings = self._request, self._backend.settings
        tools = None
        if request.tools and request.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        ids = await self._backend.tokens.chat_ids([template_message(each) for each in request.messages], tools)
        max_tokens = max_tokens_of(
            request, len(ids), default=settings.default_max_tokens, limit=settings.max_context_tokens
        )
        options: dict[str, Any] = {
            **options_of(request, max_tokens=max_tokens),
            **guide_of(request.response_format),
            "prompt_ids": ids,
            "return_log_probs": bool(request.logprobs),
        }
        prompts = [("", {**options, "seed": seed_of(request.seed, index)}) for index in range(request.num_choices)]
        return opened(self._backend.client, prompts, num_choices=request.num_choices)

    def _choice(self, index: int, pieces: list[Piece]) -> ChatChoice:
        logprobs = [part for piece in pieces if (part := self._logprobs(piece.delta)) is not None]
        reason = pieces[-1].finish_reason
        assert reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(content="".join(piece.delta.text for piece in pieces)),
            logprobs=ChatLogprobs(content=[each for part in logprobs for each in part.content]) if logprobs else None,
            finish_reason=reason,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta, self._backend.tokens) if self._request.logprobs else None

    def _event(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None, finish_reason: FinishReason | None
    ) -> str:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._chunk([choice], None)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> str:
        """A chunk's JSON: `usage` is there, null but in the last chunk, only when it was asked for."""
        chunk = ChatChunk(id=self._id, created=self._created, model=self._request.model, choices=choices, usage=usage)
        values = chunk.model_dump(mode="json")
        for choice in values["choices"]:
            choice["delta"] = {name: value for name, value in choice["delta"].items() if value is not None}
        if not self._request.includes_usage:
            del values["usage"]
        return json.dumps(values)


def template_message(message: Message) -> dict[str, Any]:
    """The message as chat templates read it: text content, parsed arguments of calls, no empty fields."""
    values = message.model_dump(exclude_none=True)
    if values["role"] == "developer":
        values["role"] = "system"
    values["content"] = _text_of(message.content)
    if isinstance(message, AssistantMessage):
        for call in values.get("tool_calls", ()):
            call["function"]["arguments"] = _parsed(call["function"]["arguments"])
    return values


def _text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _parsed(arguments: str) -> Any:
    """The arguments as a JSON value, as templates want them; as they came where they are not JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
