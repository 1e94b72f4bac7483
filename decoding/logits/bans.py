"""Tokens that may not come next, given the tokens before them: bad words, and endings before `min_tokens`.

N nodes, W banned sequences, U tokens they end in, L tokens of their longest beginning, V vocabulary. A sequence is banned by
barring its last token wherever the rest of it has just been written. Bad words look back into the prompt, as in TensorRT-LLM
and transformers.

`min_tokens` counts the tokens of the text without what ends it: an end id is barred while fewer have been written
(TensorRT-LLM's min_length, vLLM's min_tokens), and so is the token that would complete a stop sequence and leave a text,
itself cut off, of fewer.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.decoding.logits.nodes import Nodes
from furcate.decoding.request import SamplingParams

_FOREVER = 2**62


@dataclass(frozen=True)
class Ban:
    """A sequence whose last token is barred where `first` <= tokens of the answer so far < `end`."""

    token_ids: tuple[int, ...]
    first: int = 0
    end: int = _FOREVER


class Bans:
    """The banned sequences of one request.

    beginnings[w, l] is the token l + 1 places before the barred one; is_any[w, l] is true before the sequence's first token.
    """

    def __init__(self, bans: list[Ban], device: torch.device) -> None:
        self.length = max(len(ban.token_ids) for ban in bans) - 1
        reversed_ = [ban.token_ids[-2::-1] if len(ban.token_ids) > 1 else () for ban in bans]
        padded = [[*ids, *[-1] * (self.length - len(ids))] for ids in reversed_]
        self.beginnings: Int64[Tensor, "W L"] = torch.tensor(padded, dtype=torch.int64, device=device)
        self.is_any: Bool[Tensor, "W L"] = self.beginnings < 0
        lasts = torch.tensor([ban.token_ids[-1] for ban in bans], device=device)
        self.barred: Int64[Tensor, " U"]
        self.barred, self._places = lasts.unique(return_inverse=True)
        self.first: Int64[Tensor, " W"] = torch.tensor([ban.first for ban in bans], device=device)
        self.end: Int64[Tensor, " W"] = torch.tensor([ban.end for ban in bans], device=device)
        self.last_end = max(ban.end for ban in bans)
        """From this many tokens on, nothing is banned."""

    def apply(
        self, logits: Float[Tensor, "N V"], nodes: Nodes, row: int, history: list[int], num_answered: int
    ) -> None:
        """Sets barred tokens of a row's nodes to -inf, in place; `history` is prompt and answer, the root's token last."""
        num_before = (nodes.depths[row] + num_answered)[:, None]
        is_banned = (num_before >= self.first) & (num_before < self.end)
        if self.length > 0:
            suffixes = nodes.suffixes(row, history, self.length)
            is_banned = is_banned & ((suffixes[:, None] == self.beginnings) | self.is_any).all(-1)
        # Several sequences may end in the same token: any of them bars it.
        num_bans = torch.zeros(len(logits), len(self.barred), dtype=torch.int32, device=logits.device)
        is_barred = num_bans.index_add_(1, self._places, is_banned.int()) > 0
        logits[:, self.barred] = logits[:, self.barred].masked_fill_(is_barred, -torch.inf)


def bans_of(sampling: SamplingParams) -> list[Ban]:
    """What a request bans."""
    bans = [Ban(word) for word in sampling.bad_sequences]
    if sampling.min_tokens > 0:
        bans += [Ban((end_id,), 0, sampling.min_tokens) for end_id in sampling.end_ids]
        # Written so far plus this token, less the stop sequence, is what would be left of the text.
        bans += [Ban(stop, len(stop) - 1, sampling.min_tokens + len(stop) - 1) for stop in sampling.stop_sequences]
    return bans
