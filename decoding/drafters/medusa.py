"""Drafts with Medusa heads: head i gives one law for the token i + 2 positions on, whatever lies between.

B batch rows, K nodes of a level, C children, H hidden, Vd draft vocabulary.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.drafters.eagle import proposal_of
from furcate.decoding.drafters.proposer import DraftRows, Proposal
from furcate.decoding.executors.torch import TorchExecutor


class MedusaProposer:
    """Proposes with the engine's Medusa heads. A sequence's state is the target's hidden state of its last committed token."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor

    def start(self, rows: DraftRows) -> "MedusaDraft":
        return MedusaDraft(self.executor, rows)

    def observe(
        self,
        features: Float[Tensor, "B A F"],
        next_ids: Int64[Tensor, "B A"],
        num_committed: Int64[Tensor, " B"],
        rows: DraftRows,
    ) -> Float[Tensor, "B S"]:
        return features[torch.arange(len(features), device=features.device), num_committed - 1]


class MedusaDraft:
    """One tree being drafted. All heads run once, on one position a sequence."""

    def __init__(self, executor: TorchExecutor, rows: DraftRows) -> None:
        self.executor = executor
        self.logits: list[Float[Tensor, "B Vd"]] = executor.medusa_logits(rows.states)
        self.level = 0

    def begin(self, num_children: int) -> Proposal:
        return self._propose(1, num_children)

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"], num_children: int) -> Proposal:
        self.level += 1
        return self._propose(token_ids.shape[1], num_children)

    def _propose(self, num_parents: int, num_children: int) -> Proposal:
        proposal = proposal_of(self.logits[self.level][:, None], num_children, self.executor)
        return Proposal(
            log_probs=proposal.log_probs.expand(-1, num_parents, -1),
            token_ids=proposal.token_ids.expand(-1, num_parents, -1),
        )
