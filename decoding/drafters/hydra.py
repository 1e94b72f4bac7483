"""Drafts with Hydra heads (arXiv 2402.05109): Medusa heads that also read the tokens drafted before theirs.

B batch rows, K nodes of a level, C children, H hidden, W width of a path (H, and H more for each token in it).
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.drafters.eagle import chain_inputs, proposal_of
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposal
from furcate.decoding.executors.executor import EngineExecutor


class HydraProposer:
    """Proposes with the engine's Hydra heads. A sequence's state is the hidden state of its last committed token.

    The state is the target's own, or what a prefix layer made of it; that layer's K/V lies in the head's cache.
    """

    num_held_slots = 0

    def __init__(self, executor: EngineExecutor) -> None:
        self.executor = executor
        self.target_token_ids = executor.target_token_ids
        self.target_laws = executor.target_laws

    def start(self, rows: DraftRows) -> "HydraDraft":
        return HydraDraft(self.executor, rows)

    def observe(self, committed: Committed) -> Float[Tensor, "B S"]:
        assert committed.features is not None
        hidden = self.executor.hydra_prefix(committed.features, chain_inputs(committed))
        return hidden[torch.arange(len(hidden), device=hidden.device), committed.counts - 1]


class HydraDraft:
    """One tree being drafted: what head `depth` reads for every node of the newest level."""

    def __init__(self, executor: EngineExecutor, rows: DraftRows) -> None:
        assert executor.head is not None
        self.executor = executor
        self.is_grounded = executor.head.is_grounded
        self.depth = 0
        self.paths: Float[Tensor, "B K W"] = rows.states[:, None]
        self._extend(rows.root_ids[:, None])
        self.logits: Float[Tensor, "B K Vd"] = executor.hydra_logits(0, self.paths)

    def propose(self, num_children: int) -> Proposal:
        return proposal_of(self.logits, num_children, self.executor)

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"]) -> None:
        # Siblings' heads read the same hidden state and the same tokens up to their parent.
        self.paths = self.paths.gather(1, parents[:, :, None].expand(-1, -1, self.paths.shape[2]))
        self._extend(token_ids)
        self.depth += 1
        self.logits = self.executor.hydra_logits(self.depth, self.paths)

    def _extend(self, token_ids: Int64[Tensor, "B K"]) -> None:
        if self.is_grounded:
            self.paths = torch.cat([self.paths, self.executor.embed(token_ids)], dim=-1)
