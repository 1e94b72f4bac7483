"""What every acceptance rule returns.

B batch rows, N nodes, D the tree's `max_depth`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from furcate.decoding.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The nodes a step keeps, and the token after them.

    path_nodes    node indices from the root down; after the last accepted node it is repeated
    num_accepted  nodes kept, root included: path_nodes[b, :num_accepted[b]] are distinct
    bonus         the token chosen after the last accepted node

    The tokens that the step emits are token_ids of path_nodes[b, 1:num_accepted[b]], then the bonus.
    """

    path_nodes: Int64[Tensor, "B D+1"]
    num_accepted: Int64[Tensor, " B"]
    bonus: Int64[Tensor, " B"]

    @property
    def last_nodes(self) -> Int64[Tensor, " B"]:
        """The deepest accepted node."""
        return self.path_nodes[:, -1]


def accept_path_to(tree: Tree, last_nodes: Int64[Tensor, " B"], bonus: Int64[Tensor, " B"]) -> Accepted:
    """The path from the root to `last_nodes`, as Accepted."""
    on_path: Bool[Tensor, "B N"] = tree.ancestor_mask.gather(
        1, last_nodes[:, None, None].expand(-1, 1, tree.token_ids.shape[1])
    ).squeeze(1)
    # Nodes off the path are written to a column that is dropped.
    columns = torch.where(on_path, tree.depths, tree.max_depth + 1)
    indices = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    path_nodes = last_nodes[:, None].repeat(1, tree.max_depth + 2).scatter_(1, columns, indices)
    num_accepted = tree.depths.gather(1, last_nodes[:, None]).squeeze(1) + 1
    return Accepted(path_nodes=path_nodes[:, :-1], num_accepted=num_accepted, bonus=bonus)
