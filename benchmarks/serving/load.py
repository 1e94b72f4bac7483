"""Sends requests to a running server, so many at once (closed loop) or so many a second (open loop), and notes what came."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from furcate.builder.errors import RequestError, ServerError
from furcate.client import AsyncClient, Generation
from serving.requests import Ask, Fate


@dataclass(kw_only=True)
class Outcome:
    """What became of one request. Times in seconds on the client's monotonic clock."""

    ask: Ask
    sent_s: float
    piece_times_s: list[float] = field(default_factory=list)
    piece_tokens: list[int] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    generation: Generation | None = None
    refusal: str | None = None
    failure: str | None = None
    """What should not have happened: a server fault, a deadline."""
    end_s: float = 0.0

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token, as the client sees it."""
        return self.piece_times_s[0] - self.sent_s if self.piece_times_s else None

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between tokens after the first piece."""
        tokens = sum(self.piece_tokens[1:])
        return (self.piece_times_s[-1] - self.piece_times_s[0]) / tokens if tokens else None


async def send(client: AsyncClient, ask: Ask) -> Outcome:
    """One request, read to its end or left early as it says."""
    outcome = Outcome(ask=ask, sent_s=time.monotonic())
    stream = client.stream(ask.text, **ask.options)
    try:
        async with stream:
            async for delta in stream:
                if delta.token_ids:
                    outcome.piece_times_s.append(time.monotonic())
                    outcome.piece_tokens.append(len(delta.token_ids))
                    outcome.token_ids += delta.token_ids
                if ask.fate is Fate.CANCELLED and len(outcome.piece_times_s) >= ask.num_pieces:
                    break
            else:
                outcome.generation = stream.generation
    except RequestError as error:
        outcome.refusal = str(error)
    except ServerError as error:
        outcome.failure = str(error)
    outcome.end_s = time.monotonic()
    return outcome


async def closed_loop(
    client: AsyncClient, requests: Iterator[Ask], concurrency: int, *, count: int | None = None, duration_s: float = 1e9
) -> list[Outcome]:
    """Keeps `concurrency` requests running until `count` were sent or the time is up; all are read to their end."""
    outcomes: list[Outcome] = []
    end_s, num_sent = time.monotonic() + duration_s, 0

    async def one_after_another() -> None:
        nonlocal num_sent
        while time.monotonic() < end_s and (count is None or num_sent < count):
            num_sent += 1
            outcomes.append(await send(client, next(requests)))

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return outcomes


async def open_loop(
    client: AsyncClient, requests: Iterator[Ask], per_second: float, *, count: int, seed: int = 0
) -> list[Outcome]:
    """Sends `count` requests at random times (Poisson), whether earlier ones are done or not."""
    draw = random.Random(seed)
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(send(client, next(requests))))
        await asyncio.sleep(draw.expovariate(per_second))
    return list(await asyncio.gather(*tasks))
