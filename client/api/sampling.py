"""From OpenAI's fields to the client library's options."""

import json
from hashlib import sha256
from typing import Any

from furcate.client.api.chat_request import ChatRequest, JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from furcate.client.api.errors import ApiError
from furcate.client.api.fields import SamplingFields
from furcate.client.options import Options

SEED_MODULUS = 2**64


def options_of(request: SamplingFields, *, max_tokens: int) -> dict[str, Any]:
    """The options of each of the request's texts, all but the seed. Temperature is 1 where none is asked for (OpenAI's)."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "'stream_options' goes with 'stream': true; leave it out.", param="stream_options")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "min_tokens": request.min_tokens,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "end_id": -1 if request.ignore_eos else None,
    }
    if request.top_p == 0:
        options["temperature"] = 0.0  # only the likeliest token holds a probability of at least 0
    else:
        options["top_p"] = request.top_p
    if request.logit_bias:
        options["logit_bias_ids"] = [int(token) for token in request.logit_bias]
        options["logit_bias_values"] = list(request.logit_bias.values())
    return options


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of a request's text number `index`: the first has the request's own, the others one made from it."""
    if seed is None:
        return None
    if index == 0:
        return seed % SEED_MODULUS
    return int.from_bytes(sha256(f"{seed} {index}".encode()).digest()[:8], "little")


def guide_of(response_format: ResponseFormat | None) -> Options | dict[str, Any]:
    """The options that hold a text to its format."""
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
    elif isinstance(response_format, JsonObjectFormat):
        schema = {"type": "object"}
    else:
        return {}
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}


def max_tokens_of(request: ChatRequest, num_prompt_tokens: int, *, default: int, limit: int | None) -> int:
    """The tokens a chat answer may have; ApiError when the prompt leaves none."""
    asked, older = request.max_completion_tokens, request.max_tokens
    if asked is not None and older is not None and asked != older:
        raise ApiError(
            400,
            f"'max_completion_tokens' is {asked}, but its older name 'max_tokens' says {older}; send one of them.",
            param="max_tokens",
        )
    given = older if asked is None else asked
    if given is not None:
        return given
    left = default if limit is None else limit - num_prompt_tokens
    if left < 1:
        raise ApiError(
            400,
            f"The messages have {num_prompt_tokens} tokens, and this engine's limit is {limit}; shorten them.",
            param="messages",
            code="context_length_exceeded",
        )
    return min(default, left)
