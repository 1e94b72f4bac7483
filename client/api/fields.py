"""The fields that both kinds of request share, and what is said of those that cannot be honoured."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from furcate.client.api.settings import MAX_CHOICES

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_INT32 = 2**31 - 1

REFUSALS = {
    "audio": "this model makes text only.",
    "best_of": "only the texts asked for are generated; leave it out, or send n.",
    "function_call": "it was replaced by tool_choice; send that.",
    "functions": "they were replaced by tools; send those.",
    "metadata": "nothing is stored; leave it out.",
    "modalities": "this model makes text only; leave it out, or send ['text'].",
    "parallel_tool_calls": "tools only go through the chat template, whose text is not taken apart; leave it out.",
    "prediction": "the draft head makes the predictions; leave it out.",
    "reasoning_effort": "the chat template decides how the model reasons; leave it out.",
    "service_tier": "there is one service tier; leave it out, or send 'auto'.",
    "store": "nothing is stored; leave it out.",
    "suffix": "text is only generated behind the prompt; leave it out.",
    "tool_choice": "tools only go through the chat template, so no call can be forced; leave it out, or send 'auto' or 'none'.",
    "top_logprobs": "only the chosen tokens' log probabilities are known, not those of alternatives; leave it out, or send 0.",
    "verbosity": "the model has no such setting; leave it out.",
    "web_search_options": "the model cannot search the web; leave it out.",
}
"""Fields that OpenAI's clients know and this server cannot honour: their types admit only what changes nothing."""

Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_TOKEN_ID = r"^[0-9]{1,9}$"
LogitBias = Annotated[
    dict[Annotated[str, StringConstraints(pattern=_TOKEN_ID)], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    # pydantic's own schema would let other keys through.
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {_TOKEN_ID: _BIAS},
            "additionalProperties": False,
            "maxProperties": MAX_BIASES,
        }
    ),
]
"""What is added to tokens' logits, by token id."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
Hint = Annotated[str, StringConstraints(max_length=512)]


def _only(value: bool) -> Callable[[bool], bool]:
    """A check that lets `value` through and nothing else (a Literal would take 0 for false)."""

    def check(given: bool) -> bool:
        if given is not value:
            raise ValueError(f"only {str(value).lower()} can be honoured")
        return given

    return check


OnlyFalse = Annotated[bool, AfterValidator(_only(False)), WithJsonSchema({"type": "boolean", "enum": [False]})]
OnlyTrue = Annotated[bool, AfterValidator(_only(True)), WithJsonSchema({"type": "boolean", "enum": [True]})]


class Strict(BaseModel):
    """A JSON object whose fields are all known and of their own type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    """True: a last chunk, without choices, has the usage."""
    include_obfuscation: OnlyFalse | None = None


class SamplingFields(Strict):
    """How texts are chosen. The defaults are OpenAI's: temperature 1, no limits."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=MAX_INT32, description="An extra: 0 is no limit.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="An extra.")
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="An extra.")
    logit_bias: LogitBias | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT32, description="An extra.")
    ignore_eos: bool | None = Field(default=None, description="An extra: true generates up to max_tokens.")
    user: Hint | None = Field(default=None, description="Accepted; texts do not depend on it.")
    safety_identifier: Hint | None = Field(default=None, description="Accepted; texts do not depend on it.")
    prompt_cache_key: Hint | None = Field(default=None, description="Accepted; texts do not depend on it.")
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @property
    def num_choices(self) -> int:
        """Texts for each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """True when a stream closes with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
