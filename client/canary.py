"""A real generation, to know that a server serves: Triton says ready even when a model's process is dead."""

from furcate.builder.errors import RequestError, ServerError
from furcate.client.results import Generation
from furcate.client.sync_client import Client

CANARY_PROMPT = "Hello"
CANARY_MAX_TOKENS = 8
CANARY_DEADLINE_S = 120.0


def canary(url: str, *, deadline_s: float = CANARY_DEADLINE_S) -> Generation:
    """A short greedy answer of the server at `url`, through all its models; ServerError when there is none."""
    with Client(url, deadline_s=deadline_s) as client:
        try:
            generation = client.generate(CANARY_PROMPT, max_tokens=CANARY_MAX_TOKENS)
        except RequestError as error:
            raise ServerError(f"The canary generation was refused: {error}") from None
    if not generation.token_ids:
        raise ServerError(f"The canary generation gave no tokens (finish reason: {generation.finish_reason.value}).")
    return generation
