"""Drafts with Medusa heads: head i gives one law for the token i + 2 positions on, whatever lies between.

B batch rows, K nodes of a level, C children, H hidden, Vd draft vocabulary.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.drafters.eagle import proposal_of
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposal
from furcate.decoding.executors.executor import EngineExecutor


class MedusaProposer:
    """Proposes with the engine's Medusa heads. A sequence's state is the target's hidden state of its last committed token."""

    num_held_slots = 0

    def __init__(self, executor: EngineExecutor) -> None:
        self.executor = executor
        self.target_token_ids = executor.target_token_ids
        self.target_laws = executor.target_laws

    def start(self, rows: DraftRows) -> "MedusaDraft":
        return MedusaDraft(self.executor, rows)

    def observe(self, committed: Committed) -> Float[Tensor, "B S"]:
        features = committed.features
        assert features is not None
        return features[torch.arange(len(features), device=features.device), committed.counts - 1]


class MedusaDraft:
    """One tree being drafted. All heads run once, on one position a sequence."""

    def __init__(self, executor: EngineExecutor, rows: DraftRows) -> None:
        self.executor = executor
        self.head_logits: list[Float[Tensor, "B Vd"]] = executor.medusa_logits(rows.states)
        self.level = 0
        self.num_nodes = 1

    @property
    def logits(self) -> Float[Tensor, "B K Vd"]:
        return self.head_logits[self.level][:, None].expand(-1, self.num_nodes, -1)

    def propose(self, num_children: int) -> Proposal:
        proposal = proposal_of(self.head_logits[self.level][:, None], num_children, self.executor)
        return Proposal(
            log_probs=proposal.log_probs.expand(-1, self.num_nodes, -1),
            token_ids=proposal.token_ids.expand(-1, self.num_nodes, -1),
        )

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"]) -> None:
        self.level += 1
        self.num_nodes = token_ids.shape[1]
