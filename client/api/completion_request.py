"""A request to /v1/completions."""

from typing import Annotated

from pydantic import Field

from furcate.client.api.fields import MAX_INT32, SamplingFields
from furcate.client.api.settings import MAX_CHOICES

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """Prompts to go on with: texts, or tokens."""

    prompt: (
        PromptText
        | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_CHOICES)]
        | PromptIds
        | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    logprobs: int | None = Field(default=None, ge=0, le=0, description="0 gives the chosen tokens' log probabilities.")
    echo: bool | None = Field(default=None, description="True puts the prompt's text in front of each choice.")
    suffix: None = None
    best_of: int | None = Field(default=None, ge=1, le=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text, or its tokens."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        return [each for each in given if not isinstance(each, int)]
