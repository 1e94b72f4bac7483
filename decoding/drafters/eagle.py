"""Drafts with an EAGLE layer (EAGLE-1, EAGLE-2, EAGLE-3): a small decoder over (feature, next token) pairs.

The pair (feature of position p, token p + 1) lies in the head's cache slot p and is rotated by p. While a tree is drafted its
nodes' pairs lie behind the committed ones, in the order they are expanded.

B batch rows, K nodes of a level, C children, A committed tokens, H hidden, W mask words.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.decoding.drafters.draft_mask import DraftMask
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposal
from furcate.decoding.executors.executor import EngineExecutor


class EagleProposer:
    """Proposes with the engine's EAGLE head. A sequence's state is the head's hidden state after its newest token."""

    num_held_slots = 0

    def __init__(self, executor: EngineExecutor) -> None:
        self.executor = executor
        self.target_token_ids = executor.target_token_ids
        self.target_laws = executor.target_laws

    def start(self, rows: DraftRows) -> "EagleDraft":
        return EagleDraft(self.executor, rows)

    def observe(self, committed: Committed) -> Float[Tensor, "B S"]:
        assert committed.features is not None
        hidden = self.executor.head_pass(self.executor.fuse_features(committed.features), chain_inputs(committed))
        return hidden[torch.arange(len(hidden), device=hidden.device), committed.counts - 1]


def chain_inputs(committed: Committed) -> PassInputs:
    """A head's pass over what was committed: the token after position p lies in slot p and is rotated by p."""
    next_ids, lengths = committed.next_ids, committed.cache_lengths
    steps = torch.arange(next_ids.shape[1], dtype=torch.int32, device=next_ids.device)
    return PassInputs(
        token_ids=next_ids,
        positions=lengths[:, None] + steps,
        tree_mask=None,
        cache_lengths=lengths,
        page_table=committed.page_table,
        num_nodes=committed.counts if next_ids.shape[0] > 1 else None,
    )


class EagleDraft:
    """One tree being drafted: the hidden states of the newest level."""

    def __init__(self, executor: EngineExecutor, rows: DraftRows) -> None:
        self.executor = executor
        self.rows = rows
        self.hidden: Float[Tensor, "B K H"] = rows.states[:, None]
        self.logits: Float[Tensor, "B K Vd"] = executor.head_logits(self.hidden)
        self.mask = DraftMask()
        self.level = 0

    def propose(self, num_children: int) -> Proposal:
        return proposal_of(self.logits, num_children, self.executor)

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"]) -> None:
        hidden = self.hidden.gather(1, parents[:, :, None].expand(-1, -1, self.hidden.shape[2]))
        num_drafted = self.mask.num_drafted
        inputs = PassInputs(
            token_ids=token_ids,
            positions=(self.rows.cache_lengths + self.level)[:, None].expand(token_ids.shape),
            tree_mask=self.mask.extend(parents),
            cache_lengths=self.rows.cache_lengths,
            page_table=self.rows.page_table,
            node_offset=num_drafted,
        )
        self.hidden = self.executor.head_pass(hidden, inputs)
        self.logits = self.executor.head_logits(self.hidden)
        self.level += 1


def proposal_of(logits: Float[Tensor, "B K Vd"], num_children: int, executor: EngineExecutor) -> Proposal:
    """The most probable children under draft logits."""
    top = logits.topk(num_children, dim=-1)
    log_probs = top.values.float() - logits.float().logsumexp(-1, keepdim=True)
    return Proposal(log_probs=log_probs, token_ids=executor.target_token_ids(top.indices))
