"""Embedding bias and the repetition, presence and frequency penalties, for every node with its own path as context.

R rows that are processed, N nodes, T tokens, V vocabulary. In this order: the bias is added; the logit of a token seen before
(in the prompt or the answer) is divided by the repetition penalty when positive, multiplied when negative (CTRL, arXiv
1909.05858); frequency times its count in the answer is subtracted, and presence once. Temperature comes after, as in
transformers and vLLM.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from furcate.decoding.logits.nodes import Nodes
from furcate.decoding.request import SamplingParams


class TokenCounts:
    """What a sequence's penalties need of its text: its tokens, those of the prompt, and how often each stands in the answer."""

    def __init__(self, prompt_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> None:
        self._known = dict.fromkeys(prompt_ids)
        self.token_ids: Int64[Tensor, " T"] = torch.tensor(list(self._known), device=device)
        """Every token of the text once."""
        self.is_in_prompt: Bool[Tensor, " V"] = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_in_prompt[self.token_ids] = True
        self.in_answer: Float[Tensor, " V"] = torch.zeros(vocab_size, device=device)

    def extend(self, new_ids: list[int]) -> None:
        """Counts tokens just emitted."""
        ids = torch.tensor(new_ids, device=self.in_answer.device)
        self.in_answer.index_add_(0, ids, torch.ones(len(new_ids), device=ids.device))
        unknown = [token for token in dict.fromkeys(new_ids) if token not in self._known]
        if unknown:
            self._known.update(dict.fromkeys(unknown))
            self.token_ids = torch.cat([self.token_ids, torch.tensor(unknown, device=ids.device)])


def bias_of(sampling: SamplingParams, vocab_size: int, device: torch.device) -> Float[Tensor, " V"]:
    """What `embedding_bias` adds to the logits; a token listed twice gets both."""
    bias = torch.zeros(vocab_size, device=device)
    ids, values = zip(*sampling.embedding_bias, strict=True)
    return bias.index_add_(0, torch.tensor(ids, device=device), torch.tensor(values, device=device))


@dataclass(frozen=True, kw_only=True)
class PenaltyRows:
    """The rows' penalties [R, 1, 1], and the tokens that they may touch beside those of the nodes, padded with any token."""

    repetition: Float[Tensor, "R 1 1"]
    presence: Float[Tensor, "R 1 1"]
    frequency: Float[Tensor, "R 1 1"]
    token_ids: Int64[Tensor, "R T"]
    is_in_prompt: Bool[Tensor, "R V"]
    in_answer: Float[Tensor, "R V"]

    def apply(self, logits: Float[Tensor, "R N V"], nodes: Nodes) -> Float[Tensor, "R N V"]:
        """Penalised logits of every node.

        Only tokens of the texts and the trees are worked on. Each entry counts history and path in full, whether or not the
        token is on the path, so that one that comes up several times is written alike each time.
        """
        token_ids = torch.cat([self.token_ids, nodes.token_ids], dim=1)
        columns = token_ids[:, None, :].expand(-1, logits.shape[1], -1)
        counts = self.in_answer.gather(1, token_ids)[:, None] + nodes.path_counts(token_ids)
        is_in_answer = counts > 0
        values = logits.gather(2, columns)
        repeated = torch.where(values < 0, values * self.repetition, values / self.repetition)
        values = torch.where(self.is_in_prompt.gather(1, token_ids)[:, None] | is_in_answer, repeated, values)
        return logits.scatter(2, columns, values - self.frequency * counts - self.presence * is_in_answer)


def has_penalties(sampling: SamplingParams) -> bool:
    """True when a request's penalties change anything."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def penalty_rows(sampling: list[SamplingParams], counts: list[TokenCounts]) -> PenaltyRows:
    """The penalties of several rows, side by side."""
    device = counts[0].in_answer.device

    def column(values: list[float]) -> Float[Tensor, "R 1 1"]:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

    return PenaltyRows(
        repetition=column([params.repetition_penalty for params in sampling]),
        presence=column([params.presence_penalty for params in sampling]),
        frequency=column([params.frequency_penalty for params in sampling]),
        token_ids=pad_sequence([count.token_ids for count in counts], batch_first=True),
        is_in_prompt=torch.stack([count.is_in_prompt for count in counts]),
        in_answer=torch.stack([count.in_answer for count in counts]),
    )
