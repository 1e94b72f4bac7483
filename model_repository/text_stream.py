"""Tokens to text, one token at a time, so that a text never depends on how its tokens were grouped into responses."""

from collections.abc import Iterable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """What this module needs of a tokenizer (transformers' have it)."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TokenText:
    """The text of a growing token sequence.

    A token may hold part of a character, and a decoder may drop a space at the front of what it is given. So tokens are
    decoded behind the ones before them (`_context`), and while their text ends in U+FFFD, which is what an unfinished
    character decodes to, they wait for the next token.
    """

    def __init__(self, tokenizer: Decodes, *, skips_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._open: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        self._open.append(token_id)
        text = self._open_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._open = self._open, []
        self._context_text = self._decode(self._context)
        return text

    def finish(self) -> str:
        """The text still held back: an unfinished character stays U+FFFD."""
        return self._open_text()

    def _open_text(self) -> str:
        return self._decode(self._context + self._open)[len(self._context_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special_tokens)


class StopText:
    """Lets text through until the first of `stops`; what may be a stop's beginning waits."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, piece: str) -> str:
        """The text that is certainly before any stop."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_stopped, self._held = True, ""
            return text[: min(starts)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text still held back: no stop came of it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class AnswerText:
    """The text of one answer: every token up to the first stop text.

    No stop text is looked for in the first `num_unsearched_ids`: the prompt, where it is shown, and the first min_tokens.
    """

    def __init__(self, tokenizer: Decodes, *, stops: Iterable[str] = (), num_unsearched_ids: int = 0) -> None:
        self._text = TokenText(tokenizer)
        self._stop = StopText(stops)
        self._num_unsearched_ids_left = num_unsearched_ids
        self.num_ids = 0

    @property
    def is_stopped(self) -> bool:
        """True once a stop text came."""
        return self._stop.is_stopped

    def push(self, token_id: int) -> str:
        """The text that this token made certain."""
        self.num_ids += 1
        piece = self._text.push(token_id)
        if self._num_unsearched_ids_left:
            self._num_unsearched_ids_left -= 1
            return piece
        return self._stop.push(piece)

    def finish(self) -> str:
        """What was held back and belongs to the text, because no more tokens come."""
        return self._stop.push(self._text.finish()) + self._stop.finish()
