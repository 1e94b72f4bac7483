"""What the front end may be told, and the limits it keeps."""

from dataclasses import dataclass

DEFAULT_MAX_BODY_BYTES = 2 * 1024 * 1024
"""Text of some 500,000 tokens. Triton's own HTTP port would die of twice that."""
DEFAULT_MAX_ACTIVE_REQUESTS = 512
DEFAULT_MAX_TOKENS = 1024
BODY_TIMEOUT_S = 30.0
"""How long a client may take to send a request's body."""
MAX_HEADER_BYTES = 32 * 1024
MAX_CHOICES = 32
"""Texts that one request may ask for: its prompts times n."""


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """How one front end answers. `max_context_tokens` is None where the engine is not at hand to ask."""

    model_name: str
    created: int
    """When the model was made, Unix time in seconds."""
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_active_requests: int = DEFAULT_MAX_ACTIVE_REQUESTS
    """Further ones are refused at once, with 503."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """Of a chat request that names none, less where the engine's context leaves less."""
    max_context_tokens: int | None = None
