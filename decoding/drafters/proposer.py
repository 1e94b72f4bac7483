"""What grows a tree: a proposer gives the draft law of some nodes' children, level by level.

B batch rows, K nodes of a level, C children proposed a node, A committed tokens, F feature width, S state width, P pages,
Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The sequences a draft starts from: what their drafter remembers, their newest token, and where their cache is."""

    states: Shaped[Tensor, "B S"]
    root_ids: Int64[Tensor, " B"]
    cache_lengths: Int32[Tensor, " B"]
    page_table: Int32[Tensor, "B P"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The C most probable children of K nodes, best first: log-probabilities and target token ids."""

    log_probs: Float[Tensor, "B K C"]
    token_ids: Int64[Tensor, "B K C"]


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What a pass of the target made certain: counts[b] tokens, behind `cache_lengths[b]` older ones.

    features   the target's, of the committed tokens (None where no head reads any); rows from counts[b] on are padding, here
               and in next_ids
    first_ids  the first committed token
    next_ids   the tokens after each of them; next_ids[b, counts[b] - 1] is the new root, which is not committed yet
    """

    features: Float[Tensor, "B A F"] | None
    first_ids: Int64[Tensor, " B"]
    next_ids: Int64[Tensor, "B A"]
    counts: Int64[Tensor, " B"]
    cache_lengths: Int32[Tensor, " B"]
    page_table: Int32[Tensor, "B P"]
    is_prompt: bool = False
    """True for a piece of a prompt, false for what a step committed."""


class Draft(Protocol):
    """One tree being drafted. It starts at the root (K = 1)."""

    @property
    def logits(self) -> Float[Tensor, "B K Vd"]:
        """What the newest level's children are drawn from, in the draft vocabulary."""
        ...

    def propose(self, num_children: int) -> Proposal:
        """The most probable children of the newest level."""
        ...

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"]) -> None:
        """Makes these K nodes the newest level; `parents` are their parents' places in the level above."""
        ...


class Proposer(Protocol):
    """A drafter's model, ready to draft and to learn what the target made of it."""

    num_held_slots: int
    """Cache slots behind the committed tokens that hold something before any node is drafted."""

    def start(self, rows: DraftRows) -> Draft:
        """A draft for these sequences."""
        ...

    def observe(self, committed: Committed) -> Shaped[Tensor, "B S"]:
        """The new states. Whatever was cached for these positions while drafting is overwritten."""
        ...

    def target_token_ids(self, draft_ids: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        """Target ids of draft-vocabulary ids."""
        ...

    def target_laws(self, laws: Float[Tensor, "B L Vd"]) -> Float[Tensor, "B L V"]:
        """Draft laws over the target's vocabulary; tokens that the drafter does not know have probability 0."""
        ...
