"""One request while it lives: its tokens, its pages, what its drafter remembers."""

import math
import secrets
import time
from dataclasses import dataclass, field, replace

from torch import Tensor

from furcate.decoding.endings import Ending
from furcate.decoding.logits.processing import TextLogits
from furcate.decoding.request import FinishReason, Request, RequestStats, StepOutput


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """Tokens just accepted, the logit each was chosen by (after processing), and their log-probabilities when asked for."""

    token_ids: list[int]
    logits: list[float]
    log_probs: list[float] = field(default_factory=list)

    def fault(self) -> str | None:
        """Why no token could rightly be chosen: one sentence, or None when all is well."""
        if all(map(math.isfinite, self.logits)):
            return None
        if -math.inf in self.logits:
            return (
                "no token may come next: the request's bad words, min_tokens and guide together bar them all; "
                "ask for less at once."
            )
        return (
            "the target's logits are not finite numbers here, so no token can be chosen; build the engine with a wider "
            "--dtype, or check the checkpoint."
        )


class Sequence:
    """A request's progress. `cache_length` tokens are committed; `root_id` is the newest token, not cached yet."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sampling = request.sampling
        seed = request.sampling.seed
        self.seed = seed if seed is not None else secrets.randbits(63)
        self.pages: list[int] = []
        self.num_reserved_pages: int | None = None
        """None while the request waits for room in the pool."""
        self.cache_length = 0
        self.root_id: int | None = None
        """None until the prompt is done."""
        self.state: Tensor | None = None
        self.logits: TextLogits | None = None
        """None for a request that asks nothing of its logits."""
        self.ending = Ending(request.sampling)
        self.log_probs: list[float] = []
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids), arrival_time_ns=time.time_ns())

    @property
    def is_prefilled(self) -> bool:
        """True once the whole prompt is cached and the answer's first token is known."""
        return self.root_id is not None

    def waiting(self) -> StepOutput:
        """The output of a step that gave this request no token."""
        return StepOutput(request_id=self.request.request_id, stats=self.stats)

    def output(self, new: NewTokens, num_draft_tokens: int | None = None) -> StepOutput:
        """What this step gave: the tokens just accepted; `num_draft_tokens` proposed, None for a prompt's pass."""
        fault = new.fault()
        if fault is not None:
            return self.cancelled(fault)
        if self.logits is not None:
            self.logits.extend(new.token_ids)
        self.log_probs += new.log_probs
        before, num_released = len(self.ending.token_ids), self.ending.num_released
        released = self.ending.take(new.token_ids)
        kept = len(self.ending.token_ids) - before
        now = time.time_ns()
        stats = replace(
            self.stats,
            num_emitted_tokens=len(self.ending.token_ids),
            first_token_time_ns=self.stats.first_token_time_ns or now,
            last_token_time_ns=now,
        )
        if num_draft_tokens is not None:
            # Of a path that is cut, only what was emitted counts as accepted.
            accepted = min(max(kept, 0), len(new.token_ids) - 1)
            stats = replace(
                stats,
                num_target_steps=stats.num_target_steps + 1,
                num_draft_tokens=stats.num_draft_tokens + num_draft_tokens,
                num_accepted_draft_tokens=stats.num_accepted_draft_tokens + accepted,
            )
        self.stats = stats
        return StepOutput(
            request_id=self.request.request_id,
            token_ids=released,
            log_probs=tuple(self.log_probs[num_released : num_released + len(released)]),
            finish_reason=self.ending.reason,
            stats=stats,
        )

    def cancelled(self, error: str | None = None) -> StepOutput:
        """The last output of a request that ends without finishing; `error` says why where it is not the client's wish."""
        return StepOutput(
            request_id=self.request.request_id,
            finish_reason=FinishReason.CANCELLED,
            stats=self.stats,
            error=error,
        )
