"""What stands in front of every request: its id, its log line, its key, and how much of it may come."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from furcate.client.api.errors import ApiError, internal_error
from furcate.client.api.keys import KeyRing
from furcate.client.api.settings import BODY_TIMEOUT_S, ApiSettings

LOG = logging.getLogger("furcate.api")
REQUEST_ID = "x-request-id"
LINGER_S = 5.0
"""How long the rest of a refused body is read and thrown away."""
OPEN_PATHS = ("/health", "/openapi.json")
"""What needs no key: a probe and a document."""
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Gives each answer its X-Request-Id (the client's own where that is well-formed) and the log a line without texts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = asked if _GOOD_ID.fullmatch(asked) else f"req-{uuid.uuid4().hex}"
        line: dict[str, object] = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:200]}
        start_s = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            LOG.exception("request %s failed", request_id)
            if "status" not in line:
                await internal_error().response(scope["path"])(scope, receive, send_with_id)
        finally:
            line["duration_ms"] = round((time.monotonic() - start_s) * 1000, 1)
            LOG.info(json.dumps(line))


class Guards:
    """Refuses what has no key, comes when too much is running, or is too long, before anything reads it."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = KeyRing(settings.api_keys)
        self._num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            headers = Headers(scope=scope)
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            self._check_length(headers)
            self._check_room()
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        self._num_active += 1
        try:
            await self._app(scope, limited(receive, self._settings.max_body_bytes), send)
        finally:
            self._num_active -= 1

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Starlette reads header bytes as Latin-1; the same way back gives the bytes that came.
        if scheme.lower() != "bearer" or not self._keys.has(key.strip().encode("latin-1")):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise too_long(self._settings.max_body_bytes)

    def _check_room(self) -> None:
        limit = self._settings.max_active_requests
        if self._num_active >= limit:
            raise ApiError(503, f"{limit} requests are running here; try again later.", headers={"Retry-After": "1"})


class Lingering:
    """Reads on for a while where an answer closes the connection before all of the body has come: closed at once, with bytes of it
    unread, the connection would be reset, and the client might never see the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_complete = is_closing = False

        async def receive_and_note() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_and_linger(message: Message) -> None:
            nonlocal is_closing
            if message["type"] == "http.response.start":
                is_closing = Headers(raw=message["headers"]).get("connection", "").lower() == "close"
            elif is_closing and not is_complete and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while not is_complete:
                            await receive_and_note()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive_and_note, send_and_linger)


def too_long(max_bytes: int) -> ApiError:
    """The refusal of a body that is too long. The connection is closed: what is still to come of it is of no use."""
    return ApiError(
        413, f"The request's body has more than {max_bytes} bytes; send a shorter one.", headers={"Connection": "close"}
    )


def limited(receive: Receive, max_bytes: int) -> Callable[[], Awaitable[Message]]:
    """`receive`, up to `max_bytes` of body, all of which must have come in time."""
    num_bytes, is_complete = 0, False
    deadline = time.monotonic() + BODY_TIMEOUT_S

    async def receive_within() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise ApiError(
                408, f"The request's body did not come within {BODY_TIMEOUT_S:g} s.", headers={"Connection": "close"}
            ) from None
        if message["type"] == "http.request":
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
        if num_bytes > max_bytes:
            raise too_long(max_bytes)
        return message

    return receive_within
