"""One request while it lives: its tokens, its pages, what its drafter remembers."""

import secrets
import time
from dataclasses import replace

from torch import Tensor

from furcate.decoding.endings import Ending
from furcate.decoding.request import FinishReason, Request, RequestStats, StepOutput


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
        self.ending = Ending(request.sampling)
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids), arrival_time_ns=time.time_ns())

    @property
    def is_prefilled(self) -> bool:
        """True once the whole prompt is cached and the answer's first token is known."""
        return self.root_id is not None

    def output(self, new_ids: list[int] | None = None, num_draft_tokens: int | None = None) -> StepOutput:
        """What this step gave: `new_ids` just accepted; `num_draft_tokens` proposed, None for a prompt's pass."""
        if new_ids is None:
            return StepOutput(request_id=self.request.request_id, stats=self.stats)
        before = len(self.ending.token_ids)
        released = self.ending.take(new_ids)
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
            accepted = min(max(kept, 0), len(new_ids) - 1)
            stats = replace(
                stats,
                num_target_steps=stats.num_target_steps + 1,
                num_draft_tokens=stats.num_draft_tokens + num_draft_tokens,
                num_accepted_draft_tokens=stats.num_accepted_draft_tokens + accepted,
            )
        self.stats = stats
        return StepOutput(
            request_id=self.request.request_id, token_ids=released, finish_reason=self.ending.reason, stats=stats
        )

    def cancelled(self, error: str | None = None) -> StepOutput:
        """The last output of a request that ends without finishing; `error` says why where it is not the client's wish."""
        return StepOutput(
            request_id=self.request.request_id,
            finish_reason=FinishReason.CANCELLED,
            stats=self.stats,
            error=error,
        )
