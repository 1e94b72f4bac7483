"""The texts of one request, generated together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from furcate.builder.errors import ServerError
from furcate.client.api.answers import FinishReason, Usage
from furcate.client.async_client import AsyncClient, AsyncStream
from furcate.client.results import Delta
from furcate.decoding.request import FinishReason as EngineReason

MAX_WAITING_PIECES = 64
"""Pieces that wait for a slow reader; then the server waits too."""

_REASONS: dict[EngineReason, FinishReason] = {
    EngineReason.END_ID: "stop",
    EngineReason.STOP: "stop",
    EngineReason.LENGTH: "length",
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one response adds to choice `index`."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None


class Texts:
    """One request's choices. Leaving `pieces` early ends them all on the server."""

    def __init__(self, streams: Sequence[AsyncStream], *, num_choices: int) -> None:
        self._streams = streams
        self._num_choices = num_choices

    @property
    def usage(self) -> Usage:
        """The counts, once all pieces came; a prompt counts once, however many choices it has."""
        stats = [stream.generation.stats for stream in self._streams]
        num_prompt = sum(each.num_prompt_tokens for each in stats[:: self._num_choices])
        num_completion = sum(each.num_emitted_tokens for each in stats)
        return Usage(
            prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces of all choices as they come; the error of the first that fails ends the others."""
        arrivals: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(MAX_WAITING_PIECES)
        readers = [asyncio.ensure_future(_read(index, each, arrivals)) for index, each in enumerate(self._streams)]
        num_open = len(readers)
        try:
            while num_open:
                arrival = await arrivals.get()
                if isinstance(arrival, Exception):
                    raise arrival
                if arrival is None:
                    num_open -= 1
                else:
                    yield arrival
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)


def opened(client: AsyncClient, prompts: Sequence[tuple[str, dict[str, Any]]], *, num_choices: int) -> Texts:
    """The texts of (prompt, options) pairs, a pair a choice, those of one prompt side by side."""
    return Texts([client.stream(prompt, **options) for prompt, options in prompts], num_choices=num_choices)


async def _read(index: int, stream: AsyncStream, arrivals: "asyncio.Queue[Piece | Exception | None]") -> None:
    try:
        async with stream:
            async for delta in stream:
                await arrivals.put(Piece(index=index, delta=delta, finish_reason=_reason_of(delta)))
        await arrivals.put(None)
    except Exception as error:
        await arrivals.put(error)


def _reason_of(delta: Delta) -> FinishReason | None:
    if delta.finish_reason is EngineReason.CANCELLED:
        raise ServerError("The request was cancelled on the server.")
    return None if delta.finish_reason is None else _REASONS[delta.finish_reason]
