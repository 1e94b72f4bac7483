"""Log probabilities in OpenAI's two shapes."""

import math

from furcate.client.api.answers import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs
from furcate.client.api.tokens import Tokens
from furcate.client.results import Delta

IMPOSSIBLE = -9999.0
"""JSON has no minus infinity; OpenAI sends this."""


def chat_logprobs(delta: Delta, tokens: Tokens) -> ChatLogprobs:
    """Those of one piece of a chat answer."""
    pieces = [tokens.piece(token_id) for token_id in delta.token_ids]
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(token=piece.text, logprob=_finite(value), bytes=list(piece.content), top_logprobs=[])
            for piece, value in zip(pieces, delta.log_probs, strict=True)
        ]
    )


class CompletionOffsets:
    """Makes the log probabilities of one choice of /v1/completions, and knows where in its text each token begins."""

    def __init__(self, tokens: Tokens, *, start: int) -> None:
        self._tokens = tokens
        self._stream = tokens.text_stream()
        self._offset = start

    def logprobs(self, delta: Delta) -> CompletionLogprobs:
        """Those of the choice's next piece."""
        texts = [self._tokens.piece(token_id).text for token_id in delta.token_ids]
        offsets = []
        for token_id, text in zip(delta.token_ids, texts, strict=True):
            start = self._offset
            shown = self._stream.push(token_id)
            self._offset += len(shown)
            # Behind a character that stayed unfinished comes more than the token's own text.
            offsets.append(self._offset - len(text) if shown.endswith(text) else start)
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[_finite(value) for value in delta.log_probs],
            text_offset=offsets,
        )


def joined(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    """The log probabilities of a whole text."""
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else IMPOSSIBLE
