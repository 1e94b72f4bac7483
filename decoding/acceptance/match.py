"""Follow the tree with tokens the target has already chosen: greedy, and sample-and-match.

B batch rows, N nodes. The target picks one token after every node (its argmax, or a sample of its law there); the
accepted path is the one those picks spell. For a tree of deterministically picked tokens no exact rule accepts more
(E[accepted] <= sum over nodes of the target's probability of their path, which this attains), and the text equals what
plain decoding with the same choices gives. Draft probabilities play no part.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.order import table_rows
from furcate.decoding.acceptance.rule import Coins
from furcate.decoding.tree import DraftKind, Tree


def follow(tree: Tree, choices: Int64[Tensor, "B N"]) -> Accepted:
    """The path from the root along children whose token equals their parent's choice; bonus = the last node's choice.

    `choices[b, n]` is the token chosen after node n. Of children with equal tokens the first counts.
    With token_ids [5, 7, 8, 9], parents [0, 0, 0, 1] and choices [7, 9, 0, 4]: path [0, 1, 3], 3 accepted, bonus 4.
    """
    num_nodes = tree.token_ids.shape[1]
    order = torch.arange(num_nodes, device=choices.device)
    is_match = (choices.gather(1, tree.parents) == tree.token_ids) & tree.is_node
    is_match[:, 0] = False
    # The matching children of one node all hold the same token: keep the first of them.
    rank = torch.where(is_match, order, num_nodes)
    first = torch.full_like(choices, num_nodes).scatter_reduce(1, tree.parents, rank, "amin")
    is_off = ~(is_match & (first.gather(1, tree.parents) == order))
    is_off[:, 0] = False
    # One child a node is left, so the nodes with no ancestor off the path form a single path.
    is_on = tree.is_node & ~(tree.ancestor_mask & is_off[:, None, :]).any(-1)
    last_nodes = torch.where(is_on, tree.depths, -1).argmax(-1)
    return accept_path_to(tree, last_nodes, choices.gather(1, last_nodes[:, None]).squeeze(1))


class Greedy:
    """Temperature 0: follow the argmax of every node. `target` may be logits."""

    name = "greedy"
    is_lossless = True
    kinds = frozenset(DraftKind)

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`; decides without a coin."""
        return follow(tree, target.argmax(-1))


class SampleAndMatch:
    """Draw the target's own token after every node of the path it takes, and follow it. Exact for every tree.

    Only nodes of that path are drawn at, one a depth.
    """

    name = "match"
    is_lossless = True
    kinds = frozenset(DraftKind)

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`."""
        is_child = tree.is_node & (torch.arange(target.shape[1], device=target.device) > 0)
        nodes = torch.zeros_like(tree.num_nodes)
        for _ in range(tree.max_depth):
            tokens = coins.pick(nodes, table_rows(target, nodes))
            is_match = is_child & (tree.parents == nodes[:, None]) & (tree.token_ids == tokens[:, None])
            matches = is_match.byte().argmax(1)
            nodes = torch.where(matches > 0, matches, nodes)
        return accept_path_to(tree, nodes, coins.pick(nodes, table_rows(target, nodes)))
