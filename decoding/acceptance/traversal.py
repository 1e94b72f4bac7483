"""Traversal verification: bottom-up over a tree drawn without replacement (arXiv 2505.12398).

B batch rows, N nodes, V vocabulary. alpha(root) = 1, alpha(child x) = min(1, alpha P[x] / Q[x]) with its parent's current
alpha, P and Q. Nodes are tried in post-order: one whose children have all failed is accepted, with its whole path, with
probability alpha and a bonus from its P. When it fails too, its parent takes S = sum (alpha P - Q)+, P = norm((alpha P -
Q)+), alpha = S / (S + 1 - alpha) (the root keeps 1), and x is struck from Q.

What a failure does to the parent depends on nothing below the failed node. So all alphas are computed first, parents
before children, as if everything failed; then one coin a node, in post-order, finds the accepted one.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.order import (
    TINY,
    entries,
    post_order,
    select_rows,
    sibling_order,
    strike,
    table_rows,
)
from furcate.decoding.acceptance.rule import Coins, check_tree
from furcate.decoding.tree import DraftKind, Tree


class Traversal:
    """See the module."""

    name = "traversal"
    is_lossless = True
    kinds = frozenset({DraftKind.WITHOUT_REPLACEMENT})

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`."""
        check_tree(self, tree)
        failures = _Failures(tree, target)
        for trial in range(target.shape[1] - 1):
            failures.fail(trial)
        order = post_order(tree)
        last_nodes = coins.first(order, failures.alphas.gather(1, order))
        return accept_path_to(tree, last_nodes, coins.pick(last_nodes, failures.law_after(last_nodes)))


class _Failures:
    """The tree's state while node after node fails, siblings in order and parents before children."""

    def __init__(self, tree: Tree, target: Float[Tensor, "B N V"]) -> None:
        assert tree.draft_laws is not None
        num_rows, self.num_nodes, num_tokens = target.shape
        self.tree, self.target, self.laws = tree, target, tree.draft_laws
        self.nodes, self.parents = sibling_order(tree)
        # Padding has the parent N: it reads and writes a last column that nobody else reads.
        self.alphas = target.new_ones(num_rows, self.num_nodes + 1)
        self._last_trials = torch.zeros_like(self.alphas, dtype=torch.long)
        self._residuals = target.new_empty(num_rows, self.num_nodes - 1, num_tokens)
        self._Q = target[:, 0]

    def fail(self, trial: int) -> None:
        """Sets the alpha of the next node in order, and what is left to its parent when it fails."""
        nodes, parents = self.nodes[:, trial], self.parents[:, trial]
        P, Q = self._laws_before(trial)
        tokens, alphas = entries(self.tree.token_ids, nodes), entries(self.alphas, parents)
        alphas_below = (alphas * entries(P, tokens) / entries(Q, tokens).clamp(min=TINY)).clamp(max=1)
        self.alphas.scatter_(1, torch.where(parents < self.num_nodes, nodes, parents)[:, None], alphas_below[:, None])
        residual = (P * alphas[:, None]).sub_(Q).clamp_(min=0)
        total = residual.sum(1)
        torch.div(residual, total.clamp(min=TINY)[:, None], out=self._residuals[:, trial])
        # The root's is 1 by the formula too, except where nothing is left: then it must still end the search.
        alphas_left = torch.where(parents == 0, 1.0, total / (total + (1 - alphas)).clamp(min=TINY))
        self.alphas.scatter_(1, parents[:, None], alphas_left[:, None])
        self._last_trials.scatter_(1, parents[:, None], trial + 1)
        self._Q = strike(Q, tokens)

    def _laws_before(self, trial: int) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B V"]]:
        """P and Q at the parent: its own for the first child, what earlier siblings left for the others."""
        parents = self.parents[:, trial]
        P = table_rows(self.target, parents.clamp(max=self.num_nodes - 1))
        Q = table_rows(self.laws.probs, entries(self.laws.law_ids, self.nodes[:, trial]))
        if trial == 0:
            return P, Q
        is_next = parents == self.parents[:, trial - 1]
        return select_rows(is_next, self._residuals[:, trial - 1], P), select_rows(is_next, self._Q, Q)

    def law_after(self, nodes: Int64[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """The law of the bonus after `nodes`, all below them failed."""
        law = table_rows(self.target, nodes)
        if self.num_nodes == 1:
            return law
        last_trials = entries(self._last_trials, nodes)
        residual = table_rows(self._residuals, (last_trials - 1).clamp(min=0))
        return select_rows((last_trials > 0) & (residual.sum(1) > 0), residual, law)
