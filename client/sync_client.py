"""The client library for callers without an event loop: `AsyncClient`, run on one background thread."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from functools import cache
from types import TracebackType
from typing import Any, TypeVar, Unpack

from furcate.builder.errors import FurcateError
from furcate.client.async_client import DEFAULT_DEADLINE_S, SIDE_CALL_S, AsyncClient, AsyncStream
from furcate.client.options import Options
from furcate.client.results import Delta, Generation

T = TypeVar("T")


class Client:
    """Generates text on a furcate server at "grpc://host:port" or "http://host:port"; see `AsyncClient`.

    Threads may share one.
    """

    def __init__(self, url: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self.url = url
        self._client = _run(_open_client(url, deadline_s))

    def generate(self, prompt: str, **options: Unpack[Options]) -> Generation:
        """The whole answer."""
        return _run(self._client.generate(prompt, **options))

    def stream(self, prompt: str, **options: Unpack[Options]) -> "Stream":
        """The answer piece by piece; leaving it early (`close`, `with`) ends it on the server too."""
        return Stream(self._client.stream(prompt, **options))

    def cancel(self, request_id: str) -> bool:
        """True when a request with that id was running; it ends now with the reason "cancelled"."""
        return _run(self._client.cancel(request_id))

    def close(self) -> None:
        """Gives the connections back."""
        _run(self._client.close())

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # What ended the block (Ctrl-C, an error) is what the caller must see, not what closing then meets.
        with contextlib.suppress(*([FurcateError] if kind is not None else [])):
            self.close()


class Stream:
    """The pieces of one answer; afterwards `generation` is the whole."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self.request_id = stream.request_id

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        delta = _run(_next_or_none(self._stream))
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Ends the answer here and on the server, if it is still running."""
        _run(self._stream.aclose())

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # What ended the block (Ctrl-C, an error) is what the caller must see, not what closing then meets.
        with contextlib.suppress(*([FurcateError] if kind is not None else [])):
            self.close()

    @property
    def generation(self) -> Generation:
        """The whole answer; ServerError before its last piece came."""
        return self._stream.generation


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients: gRPC wants one for a process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="furcate-client", daemon=True).start()
    return loop


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Ctrl-C in the caller cancels it, and waits until it has told the server."""
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await coroutine
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(watched(), _loop())
    try:
        return future.result()
    except BaseException:
        if future.cancel():
            ended.wait(2 * SIDE_CALL_S)
        raise


async def _open_client(url: str, deadline_s: float) -> AsyncClient:
    return AsyncClient(url, deadline_s=deadline_s)


async def _next_or_none(stream: AsyncStream) -> Delta | None:
    return await anext(stream, None)
