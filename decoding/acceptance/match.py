"""Follow the tree with tokens the target has already chosen: greedy, and sample-and-match.

B batch rows, N nodes. The target picks one token after every node (its argmax, or a sample of its law there); the
accepted path is the one those picks spell. For a tree of deterministically picked tokens no exact rule accepts more
(E[accepted] <= sum over nodes of the target's probability of their path, which this attains), and the text equals what
plain decoding with the same choices gives. Draft probabilities play no part.
"""

import torch
from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.tree import Tree
from jaxtyping import Int64
from torch import Tensor


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
