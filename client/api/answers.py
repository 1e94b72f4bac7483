"""What the endpoints answer. The OpenAPI document is made from the same classes."""

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    """Tokens of the prompts and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatTokenLogprob(BaseModel):
    """A chosen token. `bytes` are its own, where its text alone is part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[dict[str, object]] = Field(max_length=0)


class ChatLogprobs(BaseModel):
    """The chosen tokens, one by one."""

    content: list[ChatTokenLogprob]


class ChatMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One text of an answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """One event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """The chosen tokens; `text_offset` is where each begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text of an answer, or what an event adds to it (its finish_reason is then null until the last)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """A whole answer of /v1/completions, or one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The model behind this front end."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["furcate"] = "furcate"


class ModelList(BaseModel):
    """What /v1/models lists."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """What /health says while the model answers."""

    status: Literal["ok"] = "ok"
    """A generation went through all of the server's models within the last seconds."""
