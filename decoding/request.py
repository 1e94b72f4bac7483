"""What a request asks for and what a step gives back. No tensors here: plain values that travel anywhere."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a text ended."""

    END_ID = "end_id"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class GuideKind(StrEnum):
    """What a guide is written in: TensorRT-LLM's names."""

    JSON = "json"
    """Any JSON value; the text is not read."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"


@dataclass(frozen=True, kw_only=True)
class Guide:
    """What a whole text must match; it may end (with an end id) only where it does."""

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's text is chosen. `temperature` 0 is greedy.

    `end_ids` is emitted as the text's last token; a stop sequence ends the text *before* itself and is not emitted.

    The target's logits are processed in this order: embedding bias; repetition penalty (tokens of prompt and answer), frequency
    and presence penalty (tokens of the answer); bad sequences and `min_tokens`; guide; temperature; top-k; top-p; min-p.
    `min_tokens` counts the tokens before what ends the text: no end id and no stop sequence comes before there are so many.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    """Tokens less likely than this share of the likeliest one's probability are left out."""
    seed: int | None = None
    end_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    embedding_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    guide: Guide | None = None
    returns_log_probs: bool = False
    """Log-softmax of the target's own logits, before anything above is done to them."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate. `request_id` is unique among the live ones."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Larger ones are served first; equal ones in the order they came."""
    timeout_s: float | None = None
    """How long it may take from its arrival on; None is without end."""


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """A request's counts so far.

    Times are those of day, in ns, by the clock at the request's arrival: a clock that is set meanwhile does not change how
    far they lie apart. None until they happen.
    """

    num_prompt_tokens: int
    num_emitted_tokens: int = 0
    num_target_steps: int = 0
    """Target passes after the prompt's; the prompt's own pass emits the first token."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_allocated_pages: int = 0
    """The most pages of its own that the request held."""
    num_reused_pages: int = 0
    """Pages of the prompt that were there already, from other requests."""
    num_reused_tokens: int = 0
    """Prompt tokens that did not have to be computed: those of reused pages, and of a copied part of one."""
    is_lossless: bool = True
    """False where the engine's acceptance rule is typical: the text's law is then not the target's."""
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int | None = None
    first_token_time_ns: int | None = None
    last_token_time_ns: int | None = None

    @property
    def tau(self) -> float | None:
        """Tokens a step yielded, bonus included; the prompt pass's token is not counted. None before a step."""
        if self.num_target_steps == 0:
            return None
        return (self.num_emitted_tokens - 1) / self.num_target_steps

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over proposed ones (0.0 when none was proposed)."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step gave one request: the tokens to emit now, and the reason when it is the last of them."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = field(default=())
    finish_reason: FinishReason | None = None
    stats: RequestStats
    error: str | None = None
    """Set when this request alone failed (its finish_reason is then CANCELLED)."""
