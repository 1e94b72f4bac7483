"""The OpenAPI document, made from the classes that read requests and write answers."""

import json
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from furcate.client.api.answers import ChatCompletion, Completion, Health, ModelCard, ModelList
from furcate.client.api.chat_request import ChatRequest
from furcate.client.api.completion_request import CompletionRequest
from furcate.client.api.errors import ErrorBody, TritonErrorBody
from furcate.client.api.generate import answer_schema, request_schema
from furcate.client.api.settings import ApiSettings

_REFUSED: dict[int, str] = {
    400: "A field is wrong, unknown or not supported; the error names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model here.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    502: "The model's server failed or cannot be reached.",
    503: "Too much is running here, or the model does not answer.",
}
_EVENT = {
    "type": "object",
    "description": "One event. Its data is a chunk as JSON, an error as JSON, or, below /v1/ at last, [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    Health,
    ErrorBody,
    TritonErrorBody,
)


def openapi_document(settings: ApiSettings) -> str:
    """The document's JSON text."""
    _, definitions = models_json_schema(
        [(model, "serialization" if "Request" not in model.__name__ else "validation") for model in _MODELS],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"]
    schemas["GenerateRequest"] = request_schema(is_streaming=False)
    schemas["GenerateStreamRequest"] = request_schema(is_streaming=True)
    schemas["GenerateAnswer"] = answer_schema()
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["properties"]["model"] = {"type": "string", "enum": [settings.model_name]}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "furcate", "version": version("furcate"), "description": "OpenAI-compatible generation."},
        "paths": _paths(settings),
        "components": {"schemas": schemas},
    }
    if settings.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return json.dumps(document)


def _paths(settings: ApiSettings) -> dict[str, Any]:
    secured: dict[str, Any] = {"security": [{"key": []}]} if settings.api_keys else {}
    named = {"name": "model", "in": "path", "required": True, "schema": {"enum": [settings.model_name]}}
    return {
        "/v1/chat/completions": {"post": {**_generation(ChatRequest, ChatCompletion), **secured}},
        "/v1/completions": {"post": {**_generation(CompletionRequest, Completion), **secured}},
        "/v2/models/ensemble/generate": {"post": {**_generate("GenerateRequest", "application/json"), **secured}},
        "/v2/models/ensemble/generate_stream": {
            "post": {**_generate("GenerateStreamRequest", "text/event-stream"), **secured}
        },
        "/v1/models": {"get": {**_operation("The one model.", ModelList, 401, 413, 503), **secured}},
        "/v1/models/{model}": {
            "get": {**_operation("The model.", ModelCard, 401, 404, 413, 503), "parameters": [named], **secured}
        },
        "/health": {"get": _operation("Whether the model answers.", Health, 413, 503)},
        "/openapi.json": {"get": _operation("This document.", None, 413, 503)},
    }


def _generation(asked: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    operation = _operation(f"{(asked.__doc__ or '').splitlines()[0]}", answer, *_REFUSED)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(asked)}}}
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return operation


def _generate(asked: str, media_type: str) -> dict[str, Any]:
    """Triton's generate: errors have Triton's shape."""
    responses: dict[str, Any] = {
        str(status): _response(sentence, _schema(TritonErrorBody)) for status, sentence in _REFUSED.items()
    }
    answer = _EVENT if media_type == "text/event-stream" else {"$ref": "#/components/schemas/GenerateAnswer"}
    responses["200"] = {"description": "The answer.", "content": {media_type: {"schema": answer}}}
    schema = {"$ref": f"#/components/schemas/{asked}"}
    return {
        "summary": "The ensemble's own inputs and outputs, as Triton's generate extension has them.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": responses,
    }


def _operation(summary: str, answer: type[BaseModel] | None, *refusals: int) -> dict[str, Any]:
    schema = {"type": "object"} if answer is None else _schema(answer)
    responses: dict[str, Any] = {"200": _response("The answer.", schema)}
    for status in refusals:
        responses[str(status)] = _response(_REFUSED[status], _schema(ErrorBody))
    return {"summary": summary, "responses": responses}


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
