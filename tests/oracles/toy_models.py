"""Target and draft models small enough to enumerate: a law over 4 tokens for every context."""

import itertools
import random
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

VOCABULARY = 4
Context = tuple[int, ...]


@cache
def random_law(seed: int, context: Context) -> tuple[float, ...]:
    """A law that depends on the context alone. Hashes of tuples of ints do not change between runs."""
    generator = random.Random(hash((seed, *context)))
    weights = [generator.random() ** 2 + 1e-3 for _ in range(VOCABULARY)]
    return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True)
class Pair:
    """A target and a drafter that knows half of it."""

    seed: int

    def target(self, context: Context) -> tuple[float, ...]:
        return random_law(2 * self.seed + 1, context)

    def draft(self, context: Context) -> tuple[float, ...]:
        noise = random_law(2 * self.seed + 2, context)
        return tuple(0.5 * p + 0.5 * r for p, r in zip(self.target(context), noise, strict=True))

    @cached_property
    def next_three(self) -> Tensor:
        """The target's law of the next three tokens, [V, V, V]."""
        return torch.stack([self.conditional(depth) for depth in range(3)]).prod(0)

    def conditional(self, depth: int) -> Tensor:
        """target(token `depth` | earlier ones) as [V, V, V], constant along later tokens."""
        cells = itertools.product(range(VOCABULARY), repeat=3)
        values = [self.target(cell[:depth])[cell[depth]] for cell in cells]
        return torch.tensor(values, dtype=torch.float64).view(VOCABULARY, VOCABULARY, VOCABULARY)


def _truncated(law: tuple[float, ...], num_tokens: int, floor: float = 0.0) -> tuple[float, ...]:
    least = sorted(law)[-num_tokens]
    kept = [value if value >= least else 0.0 for value in law]
    return tuple(max(value / sum(kept), floor) for value in kept)


@dataclass(frozen=True)
class EqualPair(Pair):
    """A drafter that knows the target exactly: every residual is empty."""

    def draft(self, context: Context) -> tuple[float, ...]:
        return self.target(context)


@dataclass(frozen=True)
class SparsePair(Pair):
    """A target that never says two of the tokens, and a drafter sure of one (others at the floor it draws with)."""

    def target(self, context: Context) -> tuple[float, ...]:
        return _truncated(super().target(context), 2)

    def draft(self, context: Context) -> tuple[float, ...]:
        return _truncated(super().draft(context), 1, floor=1e-30)


@dataclass(frozen=True)
class GreedyPair(Pair):
    """A target at temperature 0."""

    def target(self, context: Context) -> tuple[float, ...]:
        return _truncated(super().target(context), 1)

    def draft(self, context: Context) -> tuple[float, ...]:
        return Pair(self.seed).draft(context)


PAIRS = tuple(Pair(seed) for seed in range(4))
EDGE_PAIRS = (EqualPair(0), SparsePair(1), GreedyPair(2))
