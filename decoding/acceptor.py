"""Runs an acceptance rule inside a step: from logits to accepted paths.

B batch rows, N nodes, V vocabulary.
"""

from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.decoding.acceptance.accepted import Accepted
from furcate.decoding.acceptance.coins import CounterCoins
from furcate.decoding.acceptance.match import follow
from furcate.decoding.acceptance.registry import rule_named
from furcate.decoding.drafters.laws import node_laws
from furcate.decoding.sampling import SamplingRows, choose_in_tree
from furcate.decoding.tree import DraftKind, Tree

DRAFT_KINDS = {
    Acceptance.MULTI_STEP: DraftKind.WITH_REPLACEMENT,
    Acceptance.BLOCK: DraftKind.WITH_REPLACEMENT,
    Acceptance.RECURSIVE: DraftKind.WITHOUT_REPLACEMENT,
    Acceptance.TRAVERSAL: DraftKind.WITHOUT_REPLACEMENT,
    Acceptance.UNIVER: DraftKind.MIXED,
}
"""How a rule's trees are drafted at temperatures above 0; deterministically where it is not named."""


def accept(
    acceptance: Acceptance,
    tree: Tree,
    logits: Float[Tensor, "B N V"],
    rows: SamplingRows,
    root_positions: Int64[Tensor, " B"],
) -> Accepted:
    """The accepted path of every row. `root_positions` is the root's index in the text.

    Greedy batches, and sample-and-match, choose tokens only along the path that they take; the other rules need the
    target's law after every node.
    """
    if rows.is_greedy or acceptance in (Acceptance.MATCH, Acceptance.GREEDY):
        return follow(tree, choose_in_tree(tree, logits, rows, root_positions))
    coins = CounterCoins(tree, rows.seeds, root_positions)
    return rule_named(acceptance.value).accept(tree, node_laws(logits, rows), coins)
