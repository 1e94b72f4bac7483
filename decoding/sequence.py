"""One request while it lives: its tokens, its pages, what its drafter remembers."""

import math
import secrets
import time
from dataclasses import dataclass, field, replace

from torch import Tensor

from furcate.decoding.endings import Ending
from furcate.decoding.logits.processing import TextLogits
from furcate.decoding.prefix_tree import PrefixNode
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

    def __init__(self, request: Request, number: int = 0) -> None:
        self.request = request
        self.sampling = request.sampling
        self.number = number
        """How many requests came before it."""
        seed = request.sampling.seed
        self.seed = seed if seed is not None else secrets.randbits(63)
        self.token_ids = list(request.prompt_ids)
        """The prompt and every accepted token, the root last."""
        self.pages: list[int] = []
        self.nodes: list[PrefixNode] = []
        """The first pages' nodes in the prefix tree: full, shared, never written again."""
        self.num_promised_pages: int | None = None
        """Pages it may hold without asking; None while it waits for room in the pool."""
        self.num_promised = 0
        """Those of them that it has not taken yet."""
        self.turn = 0
        """Of those with a prompt to run, the one with the smallest comes first."""
        self.cache_length = 0
        self.root_id: int | None = None
        """None until the prompt is done."""
        self.state: Tensor | None = None
        self.logits: TextLogits | None = None
        """None for a request that asks nothing of its logits."""
        self.is_intact = True
        """False once a step failed in its midst: nothing of it is kept for others."""
        self.ending = Ending(request.sampling)
        self.log_probs: list[float] = []
        self.stats = RequestStats(num_prompt_tokens=len(request.prompt_ids), arrival_time_ns=time.time_ns())
        self._arrived_at_ns = time.monotonic_ns()

    @property
    def is_waiting(self) -> bool:
        """True while it has no room in the pool."""
        return self.num_promised_pages is None

    @property
    def num_rows_to_fill(self) -> int:
        """Tokens that must be committed before it can be stepped: the prompt's, or all but the root once that is known."""
        return len(self.token_ids) - (0 if self.root_id is None else 1)

    @property
    def is_prefilled(self) -> bool:
        """True once all tokens before the root are cached; false again while it is put back in line."""
        return self.root_id is not None and self.cache_length == len(self.token_ids) - 1

    @property
    def node(self) -> PrefixNode | None:
        """The last node it shares."""
        return self.nodes[-1] if self.nodes else None

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in every order: the smallest comes first and is put back in line last."""
        return -self.request.priority, self.number

    @property
    def age_s(self) -> float:
        """Seconds since it arrived, whatever is done to the machine's clock."""
        return (time.monotonic_ns() - self._arrived_at_ns) / 1e9

    def now_ns(self) -> int:
        """The time of day by the clock at its arrival: its times differ by what has really passed."""
        return self.stats.arrival_time_ns + time.monotonic_ns() - self._arrived_at_ns

    def start(self) -> None:
        """It has got room for the first time, or again."""
        if self.stats.first_scheduled_time_ns is None:
            self.stats = replace(self.stats, first_scheduled_time_ns=self.now_ns())

    def count_pages(self) -> None:
        """Keeps the most pages of its own that it has held."""
        num_pages = len(self.pages) - self.stats.num_reused_pages
        if num_pages > self.stats.num_allocated_pages:
            self.stats = replace(self.stats, num_allocated_pages=num_pages)

    def count_reused(self, *, num_pages: int, num_tokens: int) -> None:
        """Adds what it did not have to compute."""
        self.stats = replace(
            self.stats,
            num_reused_pages=self.stats.num_reused_pages + num_pages,
            num_reused_tokens=self.stats.num_reused_tokens + num_tokens,
        )

    def waiting(self) -> StepOutput:
        """The output of a step that gave this request no token."""
        return StepOutput(request_id=self.request.request_id, stats=self.stats)

    def output(self, new: NewTokens, num_draft_tokens: int | None = None) -> StepOutput:
        """What this step gave: the tokens just accepted; `num_draft_tokens` proposed, None for a prompt's pass."""
        fault = new.fault()
        if fault is not None:
            return self.cancelled(fault)
        self.token_ids += new.token_ids
        if self.logits is not None:
            self.logits.extend(new.token_ids)
        self.log_probs += new.log_probs
        before, num_released = len(self.ending.token_ids), self.ending.num_released
        released = self.ending.take(new.token_ids)
        kept = len(self.ending.token_ids) - before
        now = self.now_ns()
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
