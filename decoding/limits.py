"""Which requests an engine can serve: every limit checked before a request touches anything."""

import math

from furcate.builder.engine import Manifest
from furcate.builder.errors import RequestError
from furcate.decoding.request import Request, SamplingParams


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
    _check_sampling(sampling)
    _refuse_unsupported(sampling)


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


def _refuse_unsupported(sampling: SamplingParams) -> None:
    """Refuses by name what this version does not do, so that nothing is ignored in silence."""
    unsupported = {
        "bad_words": bool(sampling.bad_sequences),
        "min_tokens": sampling.min_tokens > 0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "embedding_bias": bool(sampling.embedding_bias),
        "log probabilities": sampling.returns_log_probs,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise RequestError(f"{name} is not supported by this engine; leave it out.")
