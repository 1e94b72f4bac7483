"""A request to /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from furcate.client.api.fields import MAX_INT32, Hint, Name, OnlyTrue, SamplingFields, Strict

MAX_MESSAGES = 1024
MAX_PARTS = 128
MAX_TOOLS = 128


class TextPart(Strict):
    """A piece of a message. Pieces are joined by line ends."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]


class InstructionMessage(Strict):
    """What the model is told to be. "developer" is OpenAI's newer word for "system", and becomes that."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Strict):
    """What a person says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class CalledFunction(Strict):
    """A call that the model asked for; `arguments` is JSON."""

    name: Name
    arguments: str


class ToolCall(Strict):
    """One call."""

    id: Hint
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """What the model said."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    name: Name | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    """What a called function gave."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Hint


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(Strict):
    """A function that the model may ask for; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool, shown to the model by its chat template."""

    type: Literal["function"]
    function: FunctionDefinition


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A schema that the text is held to, token by token."""

    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32, description="Older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: OnlyTrue | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
