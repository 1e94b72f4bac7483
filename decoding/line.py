"""The requests that wait for room in the K/V pool, in the order they will get it."""

from bisect import insort
from collections.abc import Callable, Iterator

from furcate.builder.errors import RequestError
from furcate.builder.scheduling_config import SchedulingConfig
from furcate.decoding.sequence import Sequence

BUSY = "Server busy:"
"""How the sentences begin that refuse a request because of the others: the same request may be served later."""
TIMED_OUT = "Timed out:"
"""How the sentences begin that end a request whose own time is over."""


class Line:
    """Waiting sequences: larger priorities first, then first come, first served. Nobody overtakes one that does not fit."""

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def join(self, sequence: Sequence) -> None:
        """Puts a sequence in its place; one that was put back in line comes before all that arrived after it."""
        insort(self._waiting, sequence, key=lambda waiting: waiting.rank)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out, if it is in line."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def admit(self, is_given_room: Callable[[Sequence], bool]) -> list[Sequence]:
        """Those that got room, from the head of the line on; the first that gets none holds back the rest."""
        admitted = []
        while self._waiting and is_given_room(self._waiting[0]):
            admitted.append(self._waiting.pop(0))
        return admitted

    def refuse_if_too_long(self, newcomer: Sequence) -> None:
        """Sends the newcomer away, with a RequestError, when more requests wait than may."""
        limit = self.config.max_waiting_requests
        if limit is not None and len(self._waiting) > limit:
            self.leave(newcomer)
            raise RequestError(
                f"{BUSY} {limit} requests wait already, which is the most this server lets wait; send it again later."
            )

    def overdue(self, sequence: Sequence) -> str | None:
        """Why a live sequence must end now: one sentence; None while it has time."""
        timeout_s, max_waiting_s = sequence.request.timeout_s, self.config.max_waiting_s
        if timeout_s is not None and sequence.age_s > timeout_s:
            return (
                f"{TIMED_OUT} the request's {timeout_s:g} s were over after {sequence.stats.num_emitted_tokens} of"
                f" {sequence.sampling.max_tokens} tokens; allow more time, or ask for fewer tokens."
            )
        never_ran = sequence.stats.first_scheduled_time_ns is None
        if max_waiting_s is not None and never_ran and sequence.age_s > max_waiting_s:
            return f"{BUSY} the request has waited {max_waiting_s:g} s for room, which is the longest; send it again later."
        return None
