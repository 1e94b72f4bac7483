"""What a generation gives: the pieces while it runs, and the whole."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from furcate.decoding.request import FinishReason, RequestStats


@dataclass(frozen=True, kw_only=True)
class Delta:
    """One piece of a stream. The last one has a finish reason; its text and tokens may be empty."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    log_probs: tuple[float, ...] = ()
    """One for each token when they were asked for."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A whole answer. `stats` holds the server's counts and times (Unix nanoseconds), `duration_s` is the client's."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    duration_s: float
    log_probs: tuple[float, ...] = ()
    """One for each token when they were asked for (`return_log_probs=True`)."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return self.stats.num_emitted_tokens

    @property
    def tau(self) -> float | None:
        """Tokens a target pass yielded after the prompt's; None when there was no such pass."""
        return self.stats.tau

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over proposed ones."""
        return self.stats.acceptance_rate

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the client's own time, the prompt's processing and the network included."""
        return self.num_tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def time_to_first_token_s(self) -> float | None:
        """From the request's arrival in the engine to its first token."""
        first = self.stats.first_token_time_ns
        return None if first is None else (first - self.stats.arrival_time_ns) / 1e9


def delta_from_outputs(outputs: Mapping[str, np.ndarray]) -> Delta:
    """The piece that one response of the ensemble carries."""
    reason = outputs["finish_reason"].reshape(-1)[0].decode()
    return Delta(
        text="".join(item.decode() for item in outputs["text_output"].reshape(-1)),
        token_ids=tuple(outputs["output_token_ids"].reshape(-1).tolist()),
        finish_reason=FinishReason(reason) if reason else None,
        log_probs=tuple(outputs["output_log_probs"].reshape(-1).tolist()),
    )


def num_tokens_of(outputs: Mapping[str, np.ndarray]) -> int:
    """How many generated tokens one response of the ensemble carries."""
    return int(outputs["num_output_tokens"].reshape(-1)[0])


def stats_from_outputs(outputs: Mapping[str, np.ndarray], *, num_emitted_tokens: int) -> RequestStats:
    """The counts and times of an answer, from its last response and the tokens of all of them."""

    def count(name: str) -> int:
        return int(outputs[name].reshape(-1)[0])

    return RequestStats(
        num_prompt_tokens=count("num_input_tokens"),
        num_emitted_tokens=num_emitted_tokens,
        num_target_steps=count("num_target_steps"),
        num_draft_tokens=count("total_draft_tokens"),
        num_accepted_draft_tokens=count("total_accepted_draft_tokens"),
        num_allocated_pages=count("kv_cache_alloc_new_blocks"),
        num_reused_pages=count("kv_cache_reused_blocks"),
        is_lossless=bool(outputs["is_lossless"].reshape(-1)[0]),
        arrival_time_ns=count("arrival_time_ns"),
        first_scheduled_time_ns=count("first_scheduled_time_ns") or None,
        first_token_time_ns=count("first_token_time_ns") or None,
        last_token_time_ns=count("last_token_time_ns") or None,
    )
