"""What grows a tree: a proposer names the most probable children of some nodes, level by level.

B batch rows, K nodes of a level, C children proposed a node, S state width, P pages.
"""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int32, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The sequences a draft starts from: what their drafter remembers, their newest token, and where their cache is."""

    states: Float[Tensor, "B S"]
    root_ids: Int64[Tensor, " B"]
    cache_lengths: Int32[Tensor, " B"]
    page_table: Int32[Tensor, "B P"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The C most probable children of K nodes, best first: log-probabilities and target token ids."""

    log_probs: Float[Tensor, "B K C"]
    token_ids: Int64[Tensor, "B K C"]


class Draft(Protocol):
    """One tree being drafted."""

    def begin(self, num_children: int) -> Proposal:
        """The root's children (K = 1)."""
        ...

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"], num_children: int) -> Proposal:
        """Children of the K nodes that hold `token_ids`; `parents` are their parents' places in the level above."""
        ...


class Proposer(Protocol):
    """A drafter's model, ready to draft and to learn what the target made of it."""

    def start(self, rows: DraftRows) -> Draft:
        """A draft for these sequences."""
        ...

    def observe(
        self,
        features: Float[Tensor, "B A F"],
        next_ids: Int64[Tensor, "B A"],
        num_committed: Int64[Tensor, " B"],
        rows: DraftRows,
    ) -> Float[Tensor, "B S"]:
        """The new states, from the target's true features of the tokens just committed and the tokens after them.

        `rows.cache_lengths` count the tokens before those; entries at or behind num_committed[b] are padding. Whatever the
        head had cached for these positions while it drafted is overwritten.
        """
        ...
