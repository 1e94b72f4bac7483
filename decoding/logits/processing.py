"""What the target's logits go through before a token is chosen: one step's rows, and one request's share of it.

B batch rows, R of them processed, N nodes, V vocabulary. A row that asks for nothing keeps its logits bit by bit.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from furcate.decoding.logits.bans import Bans, bans_of
from furcate.decoding.logits.guide import TextGuide
from furcate.decoding.logits.nodes import Nodes
from furcate.decoding.logits.penalties import TokenCounts, bias_of, has_penalties, penalty_rows
from furcate.decoding.request import Request
from furcate.decoding.tree import Tree


class TextLogits:
    """What one request does to logits, and its text so far, which that depends on. None stands for what it does not ask."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device, guide: TextGuide | None) -> None:
        self.sampling = request.sampling
        self.history = list(request.prompt_ids)
        self.num_answered = 0
        self.guide = guide
        self.bias = bias_of(self.sampling, vocab_size, device) if self.sampling.embedding_bias else None
        needs_counts = has_penalties(self.sampling)
        self.counts = TokenCounts(request.prompt_ids, vocab_size, device) if needs_counts else None
        bans = bans_of(self.sampling)
        self._bans = Bans(bans, device) if bans else None

    @property
    def bans(self) -> Bans | None:
        """What is banned now; bans that only hold for a text's first tokens go."""
        return self._bans if self._bans is not None and self.num_answered < self._bans.last_end else None

    @property
    def is_idle(self) -> bool:
        """True when nothing is processed (any more)."""
        return self.bias is None and self.counts is None and self.guide is None and self.bans is None

    def extend(self, new_ids: list[int]) -> None:
        """Takes in tokens just accepted: every one of them counts."""
        self.history += new_ids
        self.num_answered += len(new_ids)
        if self.counts is not None:
            self.counts.extend(new_ids)
        if self.guide is not None:
            self.guide.extend(new_ids)


class LogitsProcessing:
    """The processing of one batch. `texts` are those of `rows`."""

    def __init__(self, rows: list[int], texts: list[TextLogits], device: torch.device) -> None:
        self.rows = torch.tensor(rows, device=device)
        self.texts = texts

    def process(self, logits: Float[Tensor, "B N V"], tree: Tree) -> Float[Tensor, "B N V"]:
        """Float32 logits of every node, each processed with its own path as context. The argument is left as it is."""
        nodes = Nodes.of(tree, self.rows)
        processed = self._penalised(logits[self.rows].float(), nodes)
        for row, text in enumerate(self.texts):
            if text.bans is not None:
                text.bans.apply(processed[row], nodes, row, text.history, text.num_answered)
            if text.guide is not None:
                reached, barred = text.guide.barred(*nodes.lists(row))
                rows = torch.tensor(reached, device=logits.device)
                processed[row, rows] = processed[row, rows].masked_fill_(barred.to(logits.device), -torch.inf)
        if len(self.texts) == len(logits):
            return processed
        return logits.float().index_copy(0, self.rows, processed)

    def _penalised(self, logits: Float[Tensor, "R N V"], nodes: Nodes) -> Float[Tensor, "R N V"]:
        for row, text in enumerate(self.texts):
            if text.bias is not None:
                logits[row] += text.bias
        penalised = [row for row, text in enumerate(self.texts) if text.counts is not None]
        if not penalised:
            return logits
        chosen = [self.texts[row] for row in penalised]
        counts = [text.counts for text in chosen if text.counts is not None]
        penalties = penalty_rows([text.sampling for text in chosen], counts)
        rows = torch.tensor(penalised, device=logits.device)
        return logits.index_copy_(0, rows, penalties.apply(logits[rows], nodes.of_rows(rows)))


def processing_of(texts: Sequence[TextLogits | None], device: torch.device) -> LogitsProcessing | None:
    """The processing of a batch's rows; None when no row has any, so that they pay nothing for it."""
    rows = [row for row, text in enumerate(texts) if text is not None and not text.is_idle]
    if not rows:
        return None
    return LogitsProcessing(rows, [text for text in texts if text is not None and not text.is_idle], device)


def text_logits_of(
    request: Request, vocab_size: int, device: torch.device, guide: TextGuide | None
) -> TextLogits | None:
    """The processing a request asks for; None when it asks for none."""
    text = TextLogits(request, vocab_size, device, guide)
    return None if text.is_idle else text
