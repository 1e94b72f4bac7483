"""Whether the model behind the front end answers: a real generation, not too often."""

import asyncio
import time

from furcate.builder.errors import FurcateError
from furcate.client.api.errors import ApiError
from furcate.client.async_client import AsyncClient
from furcate.client.canary import CANARY_MAX_TOKENS, CANARY_PROMPT

VALID_S = 5.0
"""How long an answer holds: however many probes come, so often the model is asked at most."""


class HealthCheck:
    """Remembers how the last canary generation went."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._until_s = 0.0
        self._failure: ApiError | None = None

    async def check(self) -> None:
        """Nothing when the model answers; ApiError (503) when it does not."""
        async with self._lock:
            if time.monotonic() >= self._until_s:
                self._failure = await self._ask()
                self._until_s = time.monotonic() + VALID_S
        if self._failure is not None:
            raise self._failure

    async def _ask(self) -> ApiError | None:
        try:
            generation = await self._client.generate(CANARY_PROMPT, max_tokens=CANARY_MAX_TOKENS)
        except FurcateError as error:
            return ApiError(503, f"The model does not answer: {error}")
        return None if generation.token_ids else ApiError(503, "The model answers without tokens.")
