"""Drafts with a model of its own, smaller than the target (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

Its cache uses the target's pages. After a step it holds everything up to the old root; the tokens accepted since then, and the
new root, are what the next draft's first pass reads. Rejected nodes lie behind and are overwritten: that is its rollback.

B batch rows, K nodes of a level, A tokens to catch up with, S = A + 1 state width, V vocabulary.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.decoding.drafters.draft_mask import DraftMask
from furcate.decoding.drafters.eagle import proposal_of
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposal
from furcate.decoding.executors.executor import EngineExecutor


class ModelProposer:
    """Proposes with the engine's draft model. A sequence's state is the number of tokens to catch up with, then those tokens."""

    num_held_slots = 1
    """The root's K/V: it lies in front of the drafted nodes."""

    def __init__(self, executor: EngineExecutor, max_depth: int) -> None:
        self.executor = executor
        self.state_width = max_depth + 2
        self.target_token_ids = executor.target_token_ids
        self.target_laws = executor.target_laws

    def start(self, rows: DraftRows) -> "ModelDraft":
        return ModelDraft(self.executor, rows)

    def observe(self, committed: Committed) -> Int64[Tensor, "B S"]:
        counts, next_ids = committed.counts, committed.next_ids
        if committed.is_prompt:
            self._read_prompt(committed)
            counts, next_ids = torch.ones_like(counts), next_ids.gather(1, counts[:, None] - 1)
        states = next_ids.new_zeros(len(next_ids), self.state_width)
        states[:, 0] = counts
        states[:, 1 : 1 + next_ids.shape[1]] = next_ids
        return states

    def _read_prompt(self, committed: Committed) -> None:
        token_ids = torch.cat([committed.first_ids[:, None], committed.next_ids[:, :-1]], dim=1)
        self.executor.draft_model_pass(_chain(token_ids, committed.cache_lengths, committed.page_table), last_only=True)


class ModelDraft:
    """One tree being drafted."""

    def __init__(self, executor: EngineExecutor, rows: DraftRows) -> None:
        self.executor = executor
        self.rows = rows
        self.mask = DraftMask()
        self.level = 0
        counts, token_ids = rows.states[:, 0], rows.states[:, 1:]
        if counts.device.type == "cpu":
            token_ids = token_ids[:, : int(counts.max())]
        first_slots = (rows.cache_lengths + 1 - counts).int()
        is_padded = len(counts) > 1 or counts.device.type != "cpu"
        inputs = _chain(token_ids, first_slots, rows.page_table, counts if is_padded else None)
        logits = executor.draft_model_pass(inputs)
        self.logits: Float[Tensor, "B K V"] = logits.gather(
            1, (counts - 1)[:, None, None].expand(-1, 1, logits.shape[2])
        )

    def propose(self, num_children: int) -> Proposal:
        return proposal_of(self.logits, num_children, self.executor)

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"]) -> None:
        self.level += 1
        num_drafted = self.mask.num_drafted
        inputs = PassInputs(
            token_ids=token_ids,
            positions=(self.rows.cache_lengths + self.level)[:, None].expand(token_ids.shape),
            tree_mask=self.mask.extend(parents),
            cache_lengths=self.rows.cache_lengths + 1,
            page_table=self.rows.page_table,
            node_offset=num_drafted,
        )
        self.logits = self.executor.draft_model_pass(inputs)


def _chain(
    token_ids: Int64[Tensor, "B A"], first_slots: Tensor, page_table: Tensor, counts: Int64[Tensor, " B"] | None = None
) -> PassInputs:
    """A chain of tokens from these slots on; positions are slots, as in the target."""
    steps = torch.arange(token_ids.shape[1], dtype=torch.int32, device=token_ids.device)
    return PassInputs(
        token_ids=token_ids,
        positions=first_slots[:, None] + steps,
        tree_mask=None,
        cache_lengths=first_slots,
        page_table=page_table,
        num_nodes=counts,
    )
