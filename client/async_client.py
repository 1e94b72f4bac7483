"""The client library's one implementation, asynchronous; `Client` runs it for callers without an event loop."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Unpack

import numpy as np

from furcate.builder.errors import FurcateError, RequestError, ServerError
from furcate.client.messages import broke_off
from furcate.client.options import Options, parameters_from_options, tensors_from_options
from furcate.client.results import Delta, Generation, delta_from_outputs, num_tokens_of, stats_from_outputs
from furcate.client.transport import Call, Transport, transport_to

DEFAULT_DEADLINE_S = 300.0
SILENCE_S = 3.0
"""After so long without a response the client asks whether the model still lives: a dead one is only silent."""
SIDE_CALL_S = 5.0
"""How long cancelling or asking for life may take."""
SINGLE_ANSWER_INTERVAL_MS = 500
"""A single answer travels as a stream with so few responses: on them the server notices a client that was killed."""
FAREWELL_S = 10.0
"""How long a call that is over may take to end by itself."""


_CLOSED = "This client was closed; make a new one to send requests."


class _DeadlineError(ServerError):
    """The server may still be at work on the request."""


class _SlowError(ServerError):
    """A side call was not answered in time."""


class AsyncClient:
    """Generates text on a furcate server at "grpc://host:port" or "http://host:port".

    `deadline_s` holds for each request from beginning to end. Raises ConfigError for the url, RequestError for what a
    request asks, and ServerError when the server cannot be reached, fails, or passes the deadline.
    """

    def __init__(self, url: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._transport: Transport = transport_to(url)
        self._side_calls: set[asyncio.Task[dict[str, np.ndarray]]] = set()
        self._life: asyncio.Future[dict[str, np.ndarray]] | None = None
        """The question whether the model lives, on its way."""
        self._heard_s = time.monotonic()
        """When the server last said anything."""
        self._running_ids: set[str] = set()
        self._is_closed = False

    async def generate(self, prompt: str, **options: Unpack[Options]) -> Generation:
        """The whole answer."""
        excludes_prompt = options.get("exclude_input_in_output")
        # A stream never repeats the prompt.
        is_streaming = excludes_prompt is None or bool(excludes_prompt)
        stream = self._open(prompt, options, is_streaming=is_streaming, interval_ms=SINGLE_ANSWER_INTERVAL_MS)
        async for _ in stream:
            pass
        return stream.generation

    def stream(self, prompt: str, **options: Unpack[Options]) -> "AsyncStream":
        """The answer piece by piece; leaving it early (`aclose`, `async with`) ends it on the server too."""
        return self._open(prompt, options, is_streaming=True)

    def infer(
        self, tensors: Mapping[str, np.ndarray], parameters: Mapping[str, int] | None = None
    ) -> AsyncGenerator[dict[str, np.ndarray]]:
        """The ensemble's own responses to its own inputs (all with their batch dimension). Leaving early (`aclose`) ends
        the answer on the server too."""
        if self._is_closed:
            raise RequestError(_CLOSED)
        call = Call(
            model_name="ensemble",
            tensors=tensors,
            request_id=f"furcate-{uuid.uuid4().hex}",
            parameters=dict(parameters or {}),
            is_streaming=True,
        )
        return self._responses(call)

    async def cancel(self, request_id: str) -> bool:
        """True when a request with that id was running; it ends now with the reason "cancelled"."""
        if self._is_closed:
            raise RequestError(_CLOSED)
        outputs = await self._side_answer(request_id)
        return outputs["finish_reason"].reshape(-1)[0] == b"cancelled"

    async def close(self) -> None:
        """Gives the connections back. Answers under way end here with a ServerError, and on the server too."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.gather(*(self._cancel_quietly(request_id) for request_id in self._running_ids))
        await self._transport.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _open(
        self, prompt: str, options: Mapping[str, object], *, is_streaming: bool, interval_ms: int = 0
    ) -> "AsyncStream":
        if self._is_closed:
            raise RequestError(_CLOSED)
        tensors = tensors_from_options(prompt, options)
        tensors["stream"] = np.array([[is_streaming]])
        call = Call(
            model_name="ensemble",
            tensors=tensors,
            request_id=f"furcate-{uuid.uuid4().hex}",
            parameters=parameters_from_options(options)
            | ({"response_interval_ms": interval_ms} if interval_ms else {}),
            is_streaming=is_streaming,
        )
        return AsyncStream(call, self._responses(call))

    async def _responses(self, call: Call) -> AsyncGenerator[dict[str, np.ndarray]]:
        """The call's responses up to the last; whatever else ends it, the server is told to stop."""
        if self._is_closed:
            raise ServerError(_CLOSED)
        is_over = False
        deadline = time.monotonic() + self._deadline_s
        responses = self._transport.infer(call)
        self._running_ids.add(call.request_id)
        try:
            while not is_over:
                outputs = await self._next_response(responses, deadline)
                self._heard_s = time.monotonic()
                is_over = bool(outputs["finish_reason"].reshape(-1)[0])
                if self._is_closed:
                    raise ServerError(_CLOSED)
                yield outputs
        except (RequestError, ServerError) as error:
            is_over = not isinstance(error, _DeadlineError)
            if self._is_closed:
                raise ServerError(_CLOSED) from None
            raise
        finally:
            self._running_ids.discard(call.request_id)
            await _leave(responses, is_over=is_over)
            if not is_over and not self._is_closed:
                await self._cancel_quietly(call.request_id)

    async def _next_response(
        self, responses: AsyncIterator[dict[str, np.ndarray]], deadline: float
    ) -> dict[str, np.ndarray]:
        """The next response; ServerError at the deadline, or earlier when the model turns out to be dead."""
        waiting = asyncio.ensure_future(anext(responses))
        try:
            while True:
                rest_s = deadline - time.monotonic()
                await asyncio.wait({waiting}, timeout=max(min(rest_s, SILENCE_S), 0.0))
                if waiting.cancelled():  # not by us: gRPC does so to the calls of a channel that is closed
                    raise broke_off(self._url, "the call was cut off")
                if waiting.done():
                    return waiting.result()
                if rest_s <= SILENCE_S:
                    raise _DeadlineError(
                        f"The answer was not complete after {self._deadline_s:g} s and was given up; allow more with"
                        " deadline_s."
                    )
                await self._check_alive()
        except StopAsyncIteration:
            raise broke_off(self._url, "the stream ended") from None
        finally:
            await _end(waiting)

    async def _check_alive(self) -> None:
        """Raises the server's error when the model is dead; a model that is only slow is given time.

        Whatever any stream of this client heard lately shows life; else all silent streams share one question, so that many of
        them do not add to a load that is the very reason for their silence.
        """
        if time.monotonic() - self._heard_s < SILENCE_S:
            return
        if self._life is None or self._life.done():
            self._life = asyncio.ensure_future(self._side_answer(""))
            self._life.add_done_callback(lambda life: life.cancelled() or life.exception())
        with contextlib.suppress(_SlowError):
            await asyncio.shield(self._life)
            self._heard_s = time.monotonic()

    async def _cancel_quietly(self, request_id: str) -> None:
        """Tells the server to stop; it may be gone, and then there is nothing to stop."""
        with contextlib.suppress(FurcateError):
            await self._side_answer(request_id)

    async def _side_answer(self, cancel_id: str) -> dict[str, np.ndarray]:
        """The answer to a side call, waited for not too long; the call itself is never cut off, it must reach the model."""
        call = asyncio.ensure_future(self._side_call(cancel_id))
        self._side_calls.add(call)
        call.add_done_callback(self._forget_side_call)
        if not (await asyncio.wait({call}, timeout=SIDE_CALL_S))[0]:
            raise _SlowError(f"The server at {self._url} did not take the request to cancel within {SIDE_CALL_S:g} s.")
        return call.result()

    def _forget_side_call(self, call: "asyncio.Task[dict[str, np.ndarray]]") -> None:
        self._side_calls.discard(call)
        if not call.cancelled():
            call.exception()  # asked for here, so that asyncio does not report it as never retrieved

    async def _side_call(self, cancel_id: str) -> dict[str, np.ndarray]:
        """The model's answer to a request that only cancels (or, with an empty id, only asks for life)."""
        tensors = {
            "input_ids": np.zeros((1, 1), np.int32),
            "input_lengths": np.zeros((1, 1), np.int32),
            "request_output_len": np.zeros((1, 1), np.int32),
        }
        call = Call(
            model_name="tensorrt_llm",
            tensors=tensors,
            request_id=f"furcate-{uuid.uuid4().hex}",
            parameters={"cancel_id": cancel_id},
        )
        responses = self._transport.infer(call)
        has_answered = False
        try:
            outputs = await anext(responses)
            has_answered = True
            return outputs
        except StopAsyncIteration:
            raise broke_off(self._url, "the stream ended") from None
        finally:
            await _leave(responses, is_over=has_answered)


async def _leave(responses: AsyncIterator[dict[str, np.ndarray]], *, is_over: bool) -> None:
    """Closes a call; one that is over is left to end by itself: cutting it off then would leave a mark on the server."""
    if is_over:
        farewell = asyncio.ensure_future(anext(responses))
        try:
            await asyncio.wait({farewell}, timeout=FAREWELL_S)
        finally:
            await _end(farewell)
    await responses.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def _end(waiting: "asyncio.Future[dict[str, np.ndarray]]") -> None:
    """Cuts a wait off, if it is not over; how it ended does not matter (a closed channel cancels it by itself)."""
    if not waiting.done():
        waiting.cancel()
        await asyncio.wait({waiting})
    if not waiting.cancelled():
        waiting.exception()  # asked for here, so that asyncio does not report it as never retrieved


class AsyncStream:
    """The pieces of one answer; afterwards `generation` is the whole."""

    def __init__(self, call: Call, responses: AsyncIterator[dict[str, np.ndarray]]) -> None:
        self.request_id = call.request_id
        self._responses = responses
        self._deltas: list[Delta] = []
        self._last_outputs: dict[str, np.ndarray] = {}
        self._num_tokens = 0
        self._start_s = time.monotonic()
        self._duration_s = 0.0

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Delta:
        outputs = await anext(self._responses)
        self._duration_s = time.monotonic() - self._start_s
        self._last_outputs = outputs
        self._num_tokens += num_tokens_of(outputs)
        self._deltas.append(delta_from_outputs(outputs))
        return self._deltas[-1]

    async def aclose(self) -> None:
        """Ends the answer here and on the server, if it is still running."""
        await self._responses.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def generation(self) -> Generation:
        """The whole answer; ServerError before its last piece came."""
        if not self._deltas or self._deltas[-1].finish_reason is None:
            raise ServerError("The answer is not complete; read the stream to its end first.")
        return Generation(
            request_id=self.request_id,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(token_id for delta in self._deltas for token_id in delta.token_ids),
            finish_reason=self._deltas[-1].finish_reason,
            stats=stats_from_outputs(self._last_outputs, num_emitted_tokens=self._num_tokens),
            duration_s=self._duration_s,
            log_probs=tuple(log_prob for delta in self._deltas for log_prob in delta.log_probs),
        )
