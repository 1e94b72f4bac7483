"""Where a text ends: end ids, stop sequences and the token limit, inside an accepted path or not."""

from furcate.decoding.request import FinishReason, SamplingParams


class Ending:
    """Takes a request's tokens as they are accepted, and releases those that are certainly part of its text.

    A token that may be the beginning of a stop sequence is held back until that is decided. Example, stop [7, 8]:
    take [5, 7] releases [5]; take [8, 9] releases nothing and stops.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.num_released = 0
        self.reason: FinishReason | None = None

    def take(self, new_ids: list[int]) -> tuple[int, ...]:
        """The tokens released by these new ones; `reason` is set once the text has ended, and the rest is dropped."""
        for token in new_ids:
            self.token_ids.append(token)
            self.reason = self._reason(token)
            if self.reason is not None:
                break
        end = len(self.token_ids) - (0 if self.reason is not None else self._num_held())
        released = tuple(self.token_ids[self.num_released : end])
        self.num_released = max(end, self.num_released)
        return released

    def _reason(self, token: int) -> FinishReason | None:
        if token in self.sampling.end_ids:
            return FinishReason.END_ID
        for stop in self.sampling.stop_sequences:
            if tuple(self.token_ids[-len(stop) :]) == stop:
                del self.token_ids[-len(stop) :]
                return FinishReason.STOP
        if len(self.token_ids) >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _num_held(self) -> int:
        """Tokens at the end that begin a stop sequence."""
        held = 0
        for stop in self.sampling.stop_sequences:
            for length in range(len(stop) - 1, held, -1):
                if tuple(self.token_ids[-length:]) == stop[:length]:
                    held = length
                    break
        return held
