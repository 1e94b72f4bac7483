"""Sequoia's optimal tree (arXiv 2402.12374): the shape of most expected tokens, and the size of most tokens a second.

A rank's rate is the chance that, at an accepted node, the child of that rank is the one accepted. Where nodes behave alike,
a node is accepted with the product of the rates along its path, and a step yields tau = the sum of that over all nodes,
the root counting 1 (it stands for the bonus).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from furcate.builder.errors import ConfigError
from furcate.decoding.tree_shape import Path, TreeShape, shape_from_choices


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What a step costs, in milliseconds: the target's pass over a tree of n nodes, and each depth of drafting."""

    verify_ms: Mapping[int, float]
    draft_ms: float = 0.0

    def step_ms(self, budget: int, depth: int) -> float:
        """A step that drafts `depth` levels and verifies `budget` nodes."""
        return self.verify_ms[budget] + depth * self.draft_ms


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A tree and what it promises. `budget` is the table's size that the shape fits into."""

    shape: TreeShape
    budget: int
    tau: float
    step_ms: float

    @property
    def tokens_per_second(self) -> float:
        """Predicted speed of one sequence."""
        return 1000 * self.tau / self.step_ms


def optimal_shape(rank_rates: Sequence[Sequence[float]], budget: int, max_depth: int) -> TreeShape:
    """The shape of largest tau with at most `budget` nodes, root included, and at most `max_depth` levels below it.

    `rank_rates[d][k]` is the rate of rank k at depth d + 1; the last row holds for all deeper levels. A child of rank k is
    only there with those before it. Nodes that add nothing are left out. Raises ConfigError for rates that are no chances.
    """
    return _Tables(rank_rates, budget, max_depth).shape(budget)


def predicted_tau(shape: TreeShape, rank_rates: Sequence[Sequence[float]]) -> float:
    """Expected tokens a step of this shape yields, bonus included. Ranks without a rate count as never accepted."""
    tau = 0.0
    for path in shape.paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            rates = _rates_at(rank_rates, depth)
            chance *= rates[rank] if rank < len(rates) else 0.0
        tau += chance
    return tau


def plans(rank_rates: Sequence[Sequence[float]], times: StepTimes, max_depth: int) -> list[Plan]:
    """For every budget of the table, the depth and shape of most tokens a second; ordered by budget."""
    tables = {depth: _Tables(rank_rates, max(times.verify_ms), depth) for depth in range(max_depth + 1)}
    best = []
    for budget in sorted(times.verify_ms):
        shapes = (tables[depth].shape(budget) for depth in range(min(max_depth, budget - 1) + 1))
        candidates = [
            Plan(
                shape=shape,
                budget=budget,
                tau=predicted_tau(shape, rank_rates),
                step_ms=times.step_ms(budget, shape.max_depth),
            )
            for shape in shapes
        ]
        best.append(max(candidates, key=lambda plan: plan.tokens_per_second))
    return best


def best_budget(rank_rates: Sequence[Sequence[float]], times: StepTimes, max_depth: int) -> Plan:
    """The plan of most tokens a second; of equals the smallest. A budget of 1 is plain decoding: measure it as well."""
    if not times.verify_ms:
        raise ConfigError("The step-time table is empty; measure at least one tree size.")
    return max(plans(rank_rates, times, max_depth), key=lambda plan: plan.tokens_per_second)


class _Tables:
    """The dynamic programme. A subtree of n nodes at depth d is worth 1 + the best split of n - 1 among its children.

    worth[d][n]        expected accepted nodes in a subtree whose top, at depth d, is accepted
    sizes[d][k][m]     nodes given to child k when m are left for it and later ones; 0 ends the children
    """

    def __init__(self, rank_rates: Sequence[Sequence[float]], budget: int, max_depth: int) -> None:
        _check(rank_rates, budget, max_depth)
        self.depth = min(max_depth, budget - 1)
        self.sizes: list[list[np.ndarray]] = []
        worth = np.ones(budget + 1)
        for depth in reversed(range(self.depth)):
            split, sizes = np.zeros(budget), []
            for rate in reversed(_rates_at(rank_rates, depth)):
                split, chosen = _give_child(rate * worth, split)
                sizes.append(chosen)
            self.sizes.append(sizes[::-1])
            worth = np.concatenate([[0.0], 1 + split])
        self.sizes.reverse()

    def shape(self, budget: int) -> TreeShape:
        """The best shape of at most `budget` nodes."""
        return shape_from_choices(self._paths((), budget)[1:])

    def _paths(self, path: Path, size: int) -> list[Path]:
        paths, left = [path], size - 1
        for rank, sizes in enumerate(self.sizes[len(path)] if len(path) < self.depth else []):
            given = int(sizes[left])
            if given == 0:
                break
            paths += self._paths((*path, rank), given)
            left -= given
        return paths


def _give_child(gains: np.ndarray, later: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best worth of m nodes for this child and later ones, and how many this child gets. gains[j]: of j nodes for it."""
    best, chosen = np.zeros_like(later), np.zeros(len(later), dtype=np.int64)
    for left in range(1, len(later)):
        worths = gains[1 : left + 1] + later[left - 1 :: -1]
        size = int(worths.argmax())
        if worths[size] > 0:
            best[left], chosen[left] = worths[size], size + 1
    return best, chosen


def _rates_at(rank_rates: Sequence[Sequence[float]], depth: int) -> Sequence[float]:
    return rank_rates[min(depth, len(rank_rates) - 1)]


def _check(rank_rates: Sequence[Sequence[float]], budget: int, max_depth: int) -> None:
    if budget < 1 or max_depth < 0:
        raise ConfigError(f"A tree of {budget} nodes and depth {max_depth} was asked for; give at least 1 and 0.")
    if not rank_rates:
        raise ConfigError("No rank acceptance rates were given; measure at least one depth.")
    for depth, rates in enumerate(rank_rates, start=1):
        # One child at most is accepted, so the rates of a depth add up to 1 at most, but for rounding.
        if not all(0 <= rate <= 1 for rate in rates) or sum(rates) > 1 + 1e-6:
            raise ConfigError(
                f"Rank acceptance rates at depth {depth} are {list(rates)}; each must be between 0 and 1, together 1 at most."
            )
