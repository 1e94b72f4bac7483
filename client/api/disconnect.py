"""Work that ends when its client leaves: the cancel then goes on to the model."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from furcate.builder.errors import FurcateError
from furcate.client.api.errors import api_error_from, internal_error

T = TypeVar("T")
READER_TIMEOUT_S = 60.0
"""A client that takes nothing for so long is as good as gone."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`; ClientGoneError when the client leaves first, once the work has ended in order."""
    # Plain tasks: a cancel scope would cancel again and again, and cut off what tells the model to stop.
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI answer of server-sent events, `last` behind them. Until the first of them an error still has its own status."""

    def __init__(self, events: AsyncIterator[str], last: str | None = "[DONE]") -> None:
        self._events = events
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send(scope, receive, send), receive)
        except ClientGoneError:
            return

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async for data in self._events:
                if not has_begun:
                    has_begun = True
                    await send(_START)
                await _send_to_reader(send, _event(data))
            if self._last is not None:
                await _send_to_reader(send, _event(self._last))
            await send(_END)
        except FurcateError as error:
            failure = api_error_from(error)
            if not has_begun:
                await failure.response(scope["path"])(scope, receive, send)
            else:
                await _break_off(send, failure.text(scope["path"]))
        except ClientGoneError:
            raise
        except Exception:
            if has_begun:
                await _break_off(send, internal_error().text(scope["path"]))
            raise
        finally:
            await self._events.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def _break_off(send: Send, error: str) -> None:
    """Ends a stream with an error and without its last event."""
    await _send_to_reader(send, _event(error))
    await send(_END)


async def _send_to_reader(send: Send, message: dict[str, object]) -> None:
    """Sends; ClientGoneError when the client does not take it."""
    try:
        async with asyncio.timeout(READER_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientGoneError from None


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}
_END = {"type": "http.response.body", "body": b"", "more_body": False}


def _event(data: str) -> dict[str, object]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
