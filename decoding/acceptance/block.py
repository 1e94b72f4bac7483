"""Block verification: one drafted chain, accepted as a block (Sun et al., arXiv 2403.10444). No rule keeps more of one.

B batch rows, N nodes (node i is the chain's i-th draft), V vocabulary. With w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i))
and r_i = sum (w_i p - q)+, the longest prefix i is accepted whose coin succeeds with probability r_i / (r_i + 1 - w_i), or
w_i for the whole chain. The bonus is drawn from (w_i p - q)+, after the whole chain from p.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.errors import ConfigError
from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.order import TINY, entries, table_rows, weights_or
from furcate.decoding.acceptance.rule import Coins, check_tree
from furcate.decoding.tree import DraftKind, Tree


class BlockVerification:
    """See the module."""

    name = "block"
    is_lossless = True
    kinds = frozenset({DraftKind.WITH_REPLACEMENT, DraftKind.WITHOUT_REPLACEMENT})

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`. Raises ConfigError for a tree that is not a chain."""
        check_tree(self, tree)
        if not tree.is_chain:
            raise ConfigError("Block verification was given a branching tree; draft a chain, or use traversal instead.")
        chain = _Chain(tree, target)
        weight = torch.ones_like(target[:, 0, 0])
        weights, chances = [weight], [weight]
        for node in range(1, chain.num_nodes):
            weight = (weight * chain.ratio(node)).clamp(max=1)
            total = chain.excess(torch.full_like(tree.num_nodes, node), weight).sum(1)
            weights.append(weight)
            chances.append(
                torch.where(tree.num_nodes > node + 1, total / (total + (1 - weight)).clamp(min=TINY), weight)
            )
        order = torch.arange(chain.num_nodes - 1, -1, -1, device=target.device).expand(len(target), -1)
        last_nodes = coins.first(order, (torch.stack(chances, 1) * tree.is_node).flip(1))
        excess = chain.excess(last_nodes, entries(torch.stack(weights, 1), last_nodes))
        law = weights_or(excess, table_rows(target, last_nodes))
        return accept_path_to(tree, last_nodes, coins.pick(last_nodes, law))


class _Chain:
    """The laws along a chain."""

    def __init__(self, tree: Tree, target: Float[Tensor, "B N V"]) -> None:
        assert tree.draft_laws is not None
        self.tree, self.target, self.laws = tree, target, tree.draft_laws
        self.num_nodes = target.shape[1]

    def ratio(self, node: int) -> Float[Tensor, " B"]:
        """p(x) / q(x) of the node's token x."""
        tokens, law = self.tree.token_ids[:, node], table_rows(self.laws.probs, self.laws.law_ids[:, node])
        return entries(self.target[:, node - 1], tokens) / entries(law, tokens).clamp(min=TINY)

    def excess(self, nodes: Int64[Tensor, " B"], weights: Float[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """(w p - q)+ after `nodes`, with q = 0 after a chain's last."""
        below = (nodes + 1).clamp(max=self.num_nodes - 1)
        has_below = (nodes + 1 < self.tree.num_nodes).to(weights.dtype)
        law = table_rows(self.laws.probs, entries(self.laws.law_ids, below)) * has_below[:, None]
        return (table_rows(self.target, nodes) * weights[:, None]).sub_(law).clamp_(min=0)
