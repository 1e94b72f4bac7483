"""How requests share one engine: what a served engine may be told about its queue, its prompts and its K/V pages."""

import math
from dataclasses import dataclass
from enum import StrEnum

from furcate.builder.errors import ConfigError


class Reservation(StrEnum):
    """How many K/V pages a request is promised before it starts."""

    FULL = "full"
    """All that it can ever need: no request is ever taken off the engine once it runs."""
    OPTIMISTIC = "optimistic"
    """What it needs now: more requests run together; when the pool is short the newest one is put back in line, and computed
    again later. Its text stays the same."""


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig:
    """How requests share one engine. The defaults suit a server."""

    prefix_reuse: bool = True
    """Keep the K/V pages of texts that are over, and start requests that begin with the same tokens from them."""
    reservation: Reservation = Reservation.FULL
    """How many K/V pages a request is promised before it starts: full, or optimistic."""
    prefill_tokens_per_step: int | None = None
    """Prompt tokens that a step may take beside the running texts. Default: twice prefill_chunk_tokens."""
    max_waiting_requests: int | None = None
    """Requests that may wait for room in the K/V pool; further ones are refused. Default: no limit."""
    max_waiting_s: float | None = None
    """How long a request may wait for room before it is refused. Default: no limit."""


def checked_scheduling(config: SchedulingConfig) -> SchedulingConfig:
    """The same; ConfigError for a value that is not allowed."""
    for name, least in {"prefill_tokens_per_step": 1, "max_waiting_requests": 0}.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}, or be left out.")
    if config.max_waiting_s is not None and not (math.isfinite(config.max_waiting_s) and config.max_waiting_s > 0):
        raise ConfigError(f"max_waiting_s is {config.max_waiting_s}; it must be above 0, or be left out.")
    return config
