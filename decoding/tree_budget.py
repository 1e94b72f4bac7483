"""How large a tree each sequence of a batch should get: by what it had accepted lately, and by what trees cost on this machine.

Three sizes, rungs 0, 1 and 2: plain decoding, a small tree, the whole tree. Sequences of one rung run in one step, so a batch of
one step runs as up to three. Nothing here computes with tensors; B batch rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.pass_times import PassTimes

FIRST_GAIN = 1.0
"""Drafts a step that a new sequence is thought to have accepted, and one that is tried again."""
LEARNING_RATE = 0.4
SMALL_SHARE = 0.75
"""What a small tree has accepted, as a share of the whole tree's."""
FIRST_PAYMENT, LEAST_PAYMENT, MOST_PAYMENT = 0.02, 0.01, 0.08
"""What a plain step pays back of a debt, in plain steps: the least is what trees may lose of the time where nothing is ever
accepted."""
RISE, FALL = 1.5, 0.85
"""Of the payment, after a try that was worth it and after one that was not: it rises where more than three in ten are."""
MOST_DEBT = 1.0
"""Of a sequence, in plain steps."""


@dataclass(kw_only=True)
class Luck:
    """What is known of one sequence: what its trees had accepted, and what they lost."""

    gain: float = FIRST_GAIN
    """Accepted drafts of a step with the whole tree, lately."""
    debt: float = 0.0
    """What trees lost against plain decoding and plain steps have not paid back, in plain steps."""
    num_plain: int = 0
    """Plain steps since the last tree."""
    payment: float = FIRST_PAYMENT
    """What a plain step pays back. The sequence's own: what others have accepted must not cost it time."""

    @property
    def hoped_gain(self) -> float:
        """The gain to reckon with: renewed hope for a sequence that is decoded plainly and has paid its debt."""
        return max(self.gain, FIRST_GAIN) if self.num_plain > 0 and self.debt == 0 else self.gain

    def learn(self, num_accepted: int, share: float, cost: float) -> None:
        """Takes in what a tree had accepted; `cost` is its step's time, its drafter's catching up included, in plain steps."""
        if self.num_plain > 0:
            self.payment *= RISE if num_accepted > 0 else FALL
            self.payment = min(max(self.payment, LEAST_PAYMENT), MOST_PAYMENT)
        self.gain += LEARNING_RATE * (num_accepted / share - self.gain)
        self.debt = min(max(self.debt + cost - 1 - num_accepted, 0.0), MOST_DEBT)
        self.num_plain = 0

    def learn_plain(self) -> None:
        """Takes in a step without a tree."""
        self.debt = max(self.debt - self.payment, 0.0)
        self.num_plain += 1


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One size of tree: its nodes, draft passes (-1: no draft) and their width, and its share of the whole tree's gain."""

    num_nodes: int
    num_passes: int
    width: int
    share: float

    @classmethod
    def of(cls, tree: TreeConfig, share: float) -> "Rung":
        return cls(num_nodes=tree.budget, num_passes=tree.max_depth - 1, width=max(tree.top_k, 1), share=share)

    def step_ms(self, times: PassTimes, batch: int) -> float:
        """The predicted time of a step of so many sequences."""
        drafting = times.draft(self.num_passes, batch * self.width, batch) if self.num_passes >= 0 else 0.0
        return times.verify(batch * self.num_nodes, batch) + drafting

    def tokens(self, gain: float) -> float:
        """Tokens expected of a step of one sequence with this gain."""
        return 1 + min(self.share * gain, self.num_passes + 1)


def rungs_of(tree: TreeConfig) -> tuple[Rung, Rung, Rung]:
    """Plain decoding, this tree's smaller kin, and the tree."""
    plain = TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single")
    return Rung.of(plain, 0.0), Rung.of(smaller_tree(tree), SMALL_SHARE), Rung.of(tree, 1.0)


def step_table(rungs: Sequence[Rung], times: PassTimes, most_rows: int) -> Float[np.ndarray, "rungs B+1"]:
    """Milliseconds of a step of each rung with 0 to `most_rows` rows."""
    return np.array([[0.0, *(rung.step_ms(times, rows) for rows in range(1, most_rows + 1))] for rung in rungs])


def best_rungs(
    rungs: tuple[Rung, Rung, Rung], step_ms: Float[np.ndarray, "rungs B+1"], gains: Sequence[float]
) -> list[int]:
    """The rung of each sequence, so that all of them together get most tokens a second.

    Larger trees never go to smaller gains, so it is enough to try every way to cut the sequences, ordered by gain, in three.
    """
    count = len(gains)
    order = sorted(range(count), key=lambda row: -gains[row])
    # tokens[r][n] of the n sequences of most gain.
    tokens = [np.cumsum([0.0, *(rung.tokens(gains[row]) for row in order)]) for rung in rungs]
    whole, treed = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
    small = np.maximum(treed - whole, 0)
    total = tokens[2][whole] + tokens[1][treed] - tokens[1][whole] + tokens[0][count] - tokens[0][treed]
    ms = step_ms[2][whole] + step_ms[1][small] + step_ms[0][count - treed]
    speed = np.where(treed >= whole, total / ms, 0.0)
    num_whole, num_treed = divmod(int(speed.argmax()), count + 1)
    chosen = [0] * count
    for place, row in enumerate(order[:num_treed]):
        chosen[row] = 2 if place < num_whole else 1
    return chosen


def smaller_tree(tree: TreeConfig) -> TreeConfig:
    """A tree of a few nodes of the same kind."""
    if tree.kind is TreeKind.CHAIN:
        length = max(1, tree.depth // 2)
        return replace(tree, budget=length + 1, depth=length)
    if tree.kind is TreeKind.STATIC:
        choices = tuple(path for path in tree.choices if len(path) <= 2)[:5]
        depth, top_k = max(map(len, choices)), 1 + max(map(max, choices))
        return replace(tree, choices=choices, budget=len(choices) + 1, depth=depth, top_k=top_k, name="small")
    depth, top_k = min(tree.depth, 1), min(tree.top_k, 3)
    budget = min(tree.budget, 6, 1 + top_k + depth * top_k * top_k)
    return TreeConfig(kind=TreeKind.DYNAMIC, budget=budget, depth=depth, top_k=top_k)
