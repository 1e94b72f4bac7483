"""Which requests an engine can serve: every limit checked before a request touches anything."""

import math

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import Manifest
from furcate.builder.errors import RequestError
from furcate.decoding.request import Request, SamplingParams

LARGEST_PRIORITY = 100


def check_request(request: Request, manifest: Manifest) -> None:
    """Nothing; raises RequestError with one sentence when the engine cannot serve this request."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token.")
    vocab_size = manifest.target.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(f"prompt token id {wrong} is not in the vocabulary; ids run from 0 to {vocab_size - 1}.")
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; it must be at least 1.")
    limit = manifest.max_context_tokens
    if len(prompt) + sampling.max_tokens > limit:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together "
            f"{len(prompt) + sampling.max_tokens}; this engine's limit is {limit}. Shorten the prompt or lower max_tokens."
        )
    _check_turn(request)
    _check_sampling(sampling)
    _check_processing(sampling)
    _check_token_ids(sampling, vocab_size)


def check_acceptance(request: Request, acceptance: Acceptance) -> None:
    """Nothing; raises RequestError when this rule cannot choose the request's tokens."""
    if acceptance is Acceptance.GREEDY and request.sampling.temperature > 0:
        raise RequestError(
            f"temperature is {request.sampling.temperature}, and this engine accepts greedily; send 0, or build with "
            "--acceptance match."
        )


def check_pages(num_needed: int, num_pages: int) -> None:
    """Nothing; raises RequestError when a request would not fit even alone."""
    if num_needed > num_pages:
        raise RequestError(
            f"the request needs {num_needed} K/V pages and the pool has {num_pages}; "
            "shorten it, or build with a larger --max-pool-tokens."
        )


def _check_turn(request: Request) -> None:
    if abs(request.priority) > LARGEST_PRIORITY:
        raise RequestError(
            f"priority is {request.priority}; it must be from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY} (larger is first)."
        )
    if request.timeout_s is not None and not (math.isfinite(request.timeout_s) and request.timeout_s > 0):
        raise RequestError(f"the request's timeout is {request.timeout_s} s; it must be above 0, or be left out.")


def _check_sampling(sampling: SamplingParams) -> None:
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise RequestError(f"temperature is {sampling.temperature}; it must be 0 (greedy) or a positive number.")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise RequestError(f"top_k is {sampling.top_k}; it must be at least 1, or be left out.")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1.")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**64:
        raise RequestError(f"seed is {sampling.seed}; it must be from 0 to 2**64 - 1.")
    if any(not stop for stop in sampling.stop_sequences):
        raise RequestError("a stop sequence is empty; leave it out or give it at least one token.")


def _check_processing(sampling: SamplingParams) -> None:
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        raise RequestError(f"min_p is {sampling.min_p}; it must be from 0 to 1.")
    if not math.isfinite(sampling.repetition_penalty) or sampling.repetition_penalty <= 0:
        raise RequestError(
            f"repetition_penalty is {sampling.repetition_penalty}; it must be above 0 (1 changes nothing)."
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not math.isfinite(value):
            raise RequestError(f"{name} is {value}; it must be a finite number (0 changes nothing).")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; it must be from 0 to max_tokens, which is {sampling.max_tokens}."
        )
    if any(not word for word in sampling.bad_sequences):
        raise RequestError("a bad word has no tokens; leave it out or give it at least one.")
    for token, value in sampling.embedding_bias:
        if not math.isfinite(value):
            raise RequestError(f"embedding_bias of token {token} is {value}; it must be a finite number.")


def _check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Every id that a request names is one of the vocabulary."""
    named = {
        "end_id": sampling.end_ids,
        "a stop sequence": [token for stop in sampling.stop_sequences for token in stop],
        "a bad word": [token for word in sampling.bad_sequences for token in word],
        "embedding_bias": [token for token, _ in sampling.embedding_bias],
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token id {token}; the vocabulary's ids run from 0 to {vocab_size - 1}."
                )
