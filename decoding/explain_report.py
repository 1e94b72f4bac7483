"""What `furcate explain` has to tell, as plain values: the terminal, the page and the JSON file show the same."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What became of a node."""

    ROOT = "root"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """Its parent was accepted, it was not."""
    LOST = "lost"
    """Below a rejected node: it never had a chance."""
    CUT = "cut"
    """Accepted behind the end of the text."""


class Miss(StrEnum):
    """Why a step's path ended where it did."""

    VOCABULARY = "the head does not know the target's token"
    RANK = "the head ranked the target's token too low"
    BUDGET = "the head proposed the target's token, but the tree had no room for it"
    CHANCE = "the target's token was in the tree, but the rule went another way"
    NOT_EXPANDED = "the tree did not grow below the last accepted node"
    DEPTH = "everything down to the tree's depth was accepted"
    END = "the text ended"


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A node. Probabilities are given its path; None where nothing is known of it (the root, a head's unknown token)."""

    index: int
    parent: int
    depth: int
    token_id: int
    text: str
    draft_prob: float | None
    target_prob: float | None
    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step: its tree, the tokens it gave, and why it gave no more. `position` is the root's index in the answer."""

    number: int
    position: int
    nodes: tuple[NodeReport, ...]
    bonus: str
    bonus_prob: float
    """The target's probability of the bonus token."""
    num_emitted: int
    miss: Miss
    why: str

    @property
    def path(self) -> tuple[NodeReport, ...]:
        """The accepted nodes below the root."""
        return tuple(node for node in self.nodes if node.verdict in (Verdict.ACCEPTED, Verdict.CUT))


@dataclass(frozen=True, kw_only=True)
class DepthCount:
    """Of `num_reached` steps whose parents at this depth's were accepted, so many accepted a node of this depth."""

    depth: int
    num_reached: int
    num_accepted: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A whole text. `tau` is tokens a step; None when the prompt's pass gave all of it."""

    engine: str
    tree: str
    acceptance: str
    prompt: str
    text: str
    first_token: str
    finish_reason: str
    error: str | None
    num_target_steps: int
    tau: float | None
    acceptance_by_depth: tuple[DepthCount, ...]
    misses: dict[str, int]
    steps: tuple[StepReport, ...]
