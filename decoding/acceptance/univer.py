"""UniVer: trees whose nodes have deterministic children and at most one drawn one (arXiv 2605.04543).

B batch rows, N nodes, V vocabulary. At a node with law p, deterministic children u_k and a child u_m drawn from s (which
gives the u_k no mass), top-down from alpha(root) = 1:

    Z = 1 - alpha + sum (alpha p - s)+              a_m = min(1, alpha p(u_m) / s(u_m))
    a_k = alpha p(u_k) (1 - a_m) / Z                n = (1 - a_m) (1 - alpha) / Z
    alpha(child j) = a_j / (1 - sum_{i<j} a_i)      beta = 1 - n / (1 - sum a)

Then in post-order, one coin a node: a leaf is accepted with probability alpha, a node whose children have all failed with
beta; the bonus is drawn from (alpha p - s)+ without the u_k. Where nothing is drawn, s = 0; where nothing else is, this is
block verification.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.order import TINY, entries, post_order, table_rows, weights_or
from furcate.decoding.acceptance.rule import Coins, check_tree
from furcate.decoding.tree import DraftKind, Tree


class UniVer:
    """See the module."""

    name = "univer"
    is_lossless = True
    kinds = frozenset({DraftKind.MIXED, DraftKind.DETERMINISTIC})

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`."""
        check_tree(self, tree)
        chances = _Chances(tree, target)
        for node in range(min(tree.num_parents, target.shape[1])):
            chances.spread(node)
        order = post_order(tree)
        last_nodes = coins.first(order, chances.betas.gather(1, order))
        return accept_path_to(tree, last_nodes, coins.pick(last_nodes, chances.law_after(last_nodes)))


class _Chances:
    """The alphas and betas of all nodes."""

    def __init__(self, tree: Tree, target: Float[Tensor, "B N V"]) -> None:
        self.tree, self.target = tree, target
        num_rows, num_nodes, num_tokens = target.shape
        self.is_child = tree.is_node & (torch.arange(num_nodes, device=target.device) > 0)
        self.is_drawn = self.is_child & (tree.draft_laws.is_drawn if tree.draft_laws else False)
        # drawn[b, n] is the drawn child of n, 0 for none; the last column takes what the others write.
        nodes = torch.arange(num_nodes, device=target.device).expand(num_rows, -1)
        columns = torch.where(self.is_drawn, tree.parents, num_nodes)
        self.drawn = torch.zeros(num_rows, num_nodes + 1, dtype=torch.long, device=target.device)
        self.drawn = self.drawn.scatter_(1, columns, nodes)[:, :num_nodes]
        self.reach = target.flatten(1).gather(1, tree.parents * num_tokens + tree.token_ids)
        """The target's probability of each node's token at its parent."""
        self.alphas = torch.ones_like(self.reach)
        self.betas = torch.ones_like(self.reach)

    def spread(self, node: int) -> None:
        """Sets the alphas of the node's children, and its own beta; a child's beta is its alpha until it is spread too."""
        is_below = self.is_child & (self.tree.parents == node)
        # A look is free on a CPU, where most nodes of a tree are leaves.
        if node > 0 and is_below.device.type == "cpu" and not is_below.any():
            return
        alpha, drawn = self.alphas[:, node], self.drawn[:, node]
        s = self._drawn_law(drawn)
        excess = alpha if s is None else self._excess(self.target[:, node], alpha, s).sum(1)
        Z = (1 - alpha + excess).clamp(min=TINY)
        ratio = alpha * entries(self.reach, drawn) / self._drawn_mass(s, drawn)
        a_drawn = ratio.clamp(max=1) * (drawn > 0)
        rest = (alpha * (1 - a_drawn) / Z)[:, None] * self.reach
        a = torch.where(self.is_drawn, a_drawn[:, None], rest) * is_below
        total = a.cumsum(1)
        alphas = (a / (1 - total + a).clamp(min=TINY)).clamp(0, 1)
        self.alphas = torch.where(is_below, alphas, self.alphas)
        miss = (1 - a_drawn) * (1 - alpha) / Z
        self.betas = torch.where(is_below, alphas, self.betas)
        self.betas[:, node] = (1 - miss / (1 - total[:, -1]).clamp(min=TINY)).clamp(0, 1)

    def law_after(self, nodes: Int64[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """The law of the bonus after `nodes`, all below them failed."""
        law = table_rows(self.target, nodes)
        excess = self._excess(law, entries(self.alphas, nodes), self._drawn_law(entries(self.drawn, nodes)))
        is_picked: Bool[Tensor, "B N"] = self.is_child & ~self.is_drawn & (self.tree.parents == nodes[:, None])
        kept = excess.scatter_reduce(1, self.tree.token_ids, (~is_picked).to(excess.dtype), "prod")
        return weights_or(kept, law)

    def _drawn_law(self, drawn: Int64[Tensor, " B"]) -> Float[Tensor, "B V"] | None:
        """s of the drawn children, 0 for rows without one; None when no row of the tree has any."""
        laws = self.tree.draft_laws
        if laws is None or (drawn.device.type == "cpu" and not drawn.any()):
            return None
        return table_rows(laws.probs, entries(laws.law_ids, drawn)) * (drawn > 0)[:, None]

    def _drawn_mass(self, s: Float[Tensor, "B V"] | None, drawn: Int64[Tensor, " B"]) -> Float[Tensor, " B"] | float:
        return 1.0 if s is None else entries(s, entries(self.tree.token_ids, drawn)).clamp(min=TINY)

    @staticmethod
    def _excess(p: Float[Tensor, "B V"], alpha: Float[Tensor, " B"], s: Float[Tensor, "B V"] | None) -> Tensor:
        scaled = p * alpha[:, None]
        return scaled if s is None else scaled.sub_(s).clamp_(min=0)
