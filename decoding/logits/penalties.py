"""Embedding bias and the repetition, presence and frequency penalties, for every node with its own path as context.

R rows that are processed, N nodes, V vocabulary. In this order: the bias is added; the logit of a token seen before (in the
prompt or the answer) is divided by the repetition penalty when positive, multiplied when negative (CTRL, arXiv 1909.05858);
frequency times its count in the answer is subtracted, and presence once. Temperature comes after, as in transformers and
vLLM. On V x N only the history is worked in; tokens of a node's path are put right one by one.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from furcate.decoding.logits.nodes import Nodes
from furcate.decoding.request import SamplingParams


class TokenCounts:
    """What a sequence's penalties need of its text: the prompt's tokens, and how often each stands in the answer."""

    def __init__(self, prompt_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> None:
        self.is_in_prompt: Bool[Tensor, " V"] = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_in_prompt[torch.tensor(prompt_ids, device=device)] = True
        self.in_answer: Float[Tensor, " V"] = torch.zeros(vocab_size, device=device)

    def extend(self, new_ids: list[int]) -> None:
        """Counts tokens just emitted."""
        ids = torch.tensor(new_ids, device=self.in_answer.device)
        self.in_answer.index_add_(0, ids, torch.ones(len(new_ids), device=ids.device))


def bias_of(sampling: SamplingParams, vocab_size: int, device: torch.device) -> Float[Tensor, " V"]:
    """What `embedding_bias` adds to the logits; a token listed twice gets both."""
    bias = torch.zeros(vocab_size, device=device)
    ids, values = zip(*sampling.embedding_bias, strict=True)
    return bias.index_add_(0, torch.tensor(ids, device=device), torch.tensor(values, device=device))


@dataclass(frozen=True, kw_only=True)
class PenaltyRows:
    """The rows' penalties and counts; [R, 1, 1] and [R, 1, V], so that they broadcast over nodes."""

    repetition: Float[Tensor, "R 1 1"]
    presence: Float[Tensor, "R 1 1"]
    frequency: Float[Tensor, "R 1 1"]
    is_in_prompt: Bool[Tensor, "R 1 V"]
    in_answer: Float[Tensor, "R 1 V"]

    def apply(self, logits: Float[Tensor, "R N V"], nodes: Nodes) -> Float[Tensor, "R N V"]:
        """Penalised logits of every node."""
        path_counts = nodes.path_counts()
        columns = nodes.token_ids[:, None, :].expand_as(path_counts)
        # The counts of these tokens are history plus path, whether or not the token's own node is on the path: every entry
        # is right, so tokens that stand at several nodes are written twice alike.
        at_tokens = replace(
            self,
            is_in_prompt=self.is_in_prompt.gather(2, nodes.token_ids[:, None, :]),
            in_answer=self.in_answer.gather(2, nodes.token_ids[:, None, :]) + path_counts,
        )
        values = at_tokens._penalised(logits.gather(2, columns))
        return self._penalised(logits).scatter_(2, columns, values)

    def _penalised(self, logits: Float[Tensor, "R N x"]) -> Float[Tensor, "R N x"]:
        is_in_answer = self.in_answer > 0
        repeated = torch.where(logits < 0, logits * self.repetition, logits / self.repetition)
        logits = torch.where(self.is_in_prompt | is_in_answer, repeated, logits)
        return logits - self.frequency * self.in_answer - self.presence * is_in_answer


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
        is_in_prompt=torch.stack([count.is_in_prompt for count in counts])[:, None],
        in_answer=torch.stack([count.in_answer for count in counts])[:, None],
    )
