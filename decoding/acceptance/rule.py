"""What an acceptance rule is, and the coins it decides with.

B batch rows, N nodes, T trials, V vocabulary.
"""

from typing import Protocol

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.builder.errors import ConfigError
from furcate.decoding.acceptance.accepted import Accepted
from furcate.decoding.tree import DraftKind, Tree


class Coins(Protocol):
    """All the chance in a rule. A rule never sees a random number, only outcomes of the probabilities it states.

    So one run of the code that serves requests can be replayed along every branch with its exact weight: that is how the
    tests prove a rule's law, with no sampling. Each trial may be flipped once; a node picked again gives the same token.
    """

    def flip(self, trials: Int64[Tensor, " B"], probs: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """True with probability `probs`, by the coin of that trial. Rows with nothing to decide state probability 0."""
        ...

    def first(self, order: Int64[Tensor, "B T"], probs: Float[Tensor, "B T"]) -> Int64[Tensor, " B"]:
        """The first entry of `order` whose coin, of probability `probs` at the same place, succeeds; one must be 1."""
        ...

    def pick(self, nodes: Int64[Tensor, " B"], weights: Float[Tensor, "B V"]) -> Int64[Tensor, " B"]:
        """A token after `nodes`, with probability proportional to `weights`."""
        ...


class AcceptanceRule(Protocol):
    """Decides which nodes of a verified tree stay, and the token after them."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def is_lossless(self) -> bool:
        """True when the emitted text has exactly the target's distribution."""
        ...

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """The trees it takes; for a lossless rule, those it is exact for."""
        ...

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """The accepted path of every row.

        `target[b, n]` is the target's distribution of the token after node n: temperature, top-k, top-p and penalties
        already applied, for they belong to the law that must come out. The draft's temperature is its own affair.
        """
        ...


def check_tree(rule: AcceptanceRule, tree: Tree) -> None:
    """Raises ConfigError when the rule's law would be wrong for trees of this kind."""
    if tree.kind not in rule.kinds:
        allowed = " or ".join(sorted(kind.value for kind in rule.kinds))
        raise ConfigError(
            f"The acceptance rule {rule.name!r} was given a tree whose tokens are {tree.kind.value}; it is exact for "
            f"{allowed} only. Choose another rule or another way of drafting."
        )
