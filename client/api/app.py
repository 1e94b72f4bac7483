"""The front end's routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from furcate.builder.errors import FurcateError
from furcate.client.api.answers import Health, ModelCard, ModelList
from furcate.client.api.backend import Backend
from furcate.client.api.chat import ChatAnswer
from furcate.client.api.chat_request import ChatRequest
from furcate.client.api.completion_request import CompletionRequest
from furcate.client.api.completions import CompletionAnswer
from furcate.client.api.disconnect import ClientGoneError, EventStream, unless_gone
from furcate.client.api.errors import ApiError, api_error_from
from furcate.client.api.fields import SamplingFields
from furcate.client.api.generate import GenerateAnswer, read_generate
from furcate.client.api.guards import Guards, Lingering, RequestIds
from furcate.client.api.health import HealthCheck
from furcate.client.api.openapi import openapi_document
from furcate.client.api.reading import read_body

R = TypeVar("R", bound=SamplingFields)
CLIENT_GONE = 499
"""Nobody reads this status; it is for the log."""


def build_app(backend: Backend) -> ASGIApp:
    """The ASGI app; it closes the backend at its end."""
    endpoints = _Endpoints(backend)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await backend.client.close()
        backend.tokens.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{model:path}", endpoints.model, methods=["GET"]),
            Route("/v2/models/ensemble/generate", endpoints.generate, methods=["POST"]),
            Route("/v2/models/ensemble/generate_stream", endpoints.generate_stream, methods=["POST"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/openapi.json", endpoints.openapi, methods=["GET"]),
        ],
        exception_handlers={
            FurcateError: _furcate_error,
            HTTPException: _http_error,
            ClientGoneError: _client_gone,
            ClientDisconnect: _client_gone,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return Lingering(RequestIds(Guards(app, backend.settings)))


class _Endpoints:
    """One method a route."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        settings = backend.settings
        self._card = ModelCard(id=settings.model_name, created=settings.created)
        self._health = HealthCheck(backend.client)
        self._openapi = openapi_document(settings)

    async def chat(self, request: Request) -> Any:
        """An answer to a conversation."""
        asked = await self._read(request, ChatRequest)
        return await _answered(request, asked, ChatAnswer(asked, self._backend))

    async def completions(self, request: Request) -> Any:
        """Prompts gone on with."""
        asked = await self._read(request, CompletionRequest)
        return await _answered(request, asked, CompletionAnswer(asked, self._backend))

    async def generate(self, request: Request) -> Response:
        """An answer of the ensemble, in one piece."""
        asked = read_generate(await _json_body(request), is_streaming=False)
        text = await unless_gone(GenerateAnswer(asked, self._backend.client).whole(), request.receive)
        return Response(text, media_type="application/json")

    async def generate_stream(self, request: Request) -> Any:
        """An answer of the ensemble, response by response."""
        asked = read_generate(await _json_body(request), is_streaming=True)
        return EventStream(GenerateAnswer(asked, self._backend.client).events(), last=None)

    async def models(self, request: Request) -> Response:
        """The one model."""
        return _json(ModelList(data=[self._card]))

    async def model(self, request: Request) -> Response:
        """The model, by name."""
        self._check_model(request.path_params["model"])
        return _json(self._card)

    async def health(self, request: Request) -> Response:
        """Whether the model answers."""
        await unless_gone(self._health.check(), request.receive)
        return _json(Health())

    async def openapi(self, request: Request) -> Response:
        """What there is, for programs."""
        return Response(self._openapi, media_type="application/json")

    async def _read(self, request: Request, model: type[R]) -> R:
        asked = read_body(await _json_body(request), model)
        self._check_model(asked.model)
        return asked

    def _check_model(self, name: str) -> None:
        if name != self._card.id:
            raise ApiError(
                404,
                f"There is no model '{name[:100]}' here; the model is '{self._card.id}'.",
                param="model",
                code="model_not_found",
            )


async def _json_body(request: Request) -> bytes:
    """The body of a request that says it is JSON: a web page may send text/plain anywhere without asking first, but not this."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"The Content-Type is '{media_type[:100]}'; it must be application/json.")
    return await request.body()


async def _answered(request: Request, asked: SamplingFields, answer: ChatAnswer | CompletionAnswer) -> Any:
    if asked.stream:
        return EventStream(answer.events())
    return _json(await unless_gone(answer.whole(), request.receive))


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


async def _furcate_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FurcateError)
    return api_error_from(error).response(request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {
        404: f"There is nothing at '{request.url.path[:100]}'; see /openapi.json.",
        405: f"{request.method} cannot be used on '{request.url.path[:100]}'; see /openapi.json.",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, sentence, headers=error.headers).response(request.url.path)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
