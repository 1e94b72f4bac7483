"""The nodes of one step as logits processing sees them, and each node's own context.

R rows that are processed, N nodes, L tokens of context, T tokens asked about. The root is a sequence's newest token: what is
known of a sequence's history includes it, so paths count from below the root.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.decoding.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The trees of the rows that are processed. below_root[r, n, j] is true when j is n or its ancestor, but not the root."""

    token_ids: Int64[Tensor, "R N"]
    parents: Int64[Tensor, "R N"]
    depths: Int64[Tensor, "R N"]
    below_root: Bool[Tensor, "R N N"]

    @classmethod
    def of(cls, tree: Tree, rows: Int64[Tensor, " R"]) -> "Nodes":
        """The trees of these rows of a batch."""
        below_root = tree.ancestor_mask[rows]
        below_root[:, :, 0] = False
        return cls(
            token_ids=tree.token_ids[rows], parents=tree.parents[rows], depths=tree.depths[rows], below_root=below_root
        )

    def of_rows(self, rows: Int64[Tensor, " R"]) -> "Nodes":
        """Some of these rows."""
        return Nodes(
            token_ids=self.token_ids[rows],
            parents=self.parents[rows],
            depths=self.depths[rows],
            below_root=self.below_root[rows],
        )

    def path_counts(self, token_ids: Int64[Tensor, "R T"]) -> Float[Tensor, "R N T"]:
        """How often token_ids[r, t] stands on the path to node n, at [r, n, t]; the root's token is not counted.

        A chain of [5, 7, 7] has for the tokens [5, 7] the rows [0, 0], [0, 1], [0, 2].
        """
        is_same = (self.token_ids[:, :, None] == token_ids[:, None, :]).float()
        return self.below_root.float() @ is_same

    def suffixes(self, row: int, history: list[int], length: int) -> Int64[Tensor, "N L"]:
        """The last `length` tokens up to each node of a row, its own first; -1 before the text's first token.

        `history` ends with the root's token. With history [3, 4, 5] and a child 7 of the root: [[5, 4], [7, 5]].
        """
        tail = torch.tensor([*history[: -length - 1 : -1], *[-1] * length][:length], device=self.token_ids.device)
        token_ids, parents, depths = self.token_ids[row], self.parents[row], self.depths[row]
        above = torch.arange(len(token_ids), device=token_ids.device)
        columns = []
        for distance in range(length):
            before_root = tail[(distance - depths).clamp(min=0)]
            columns.append(torch.where(depths >= distance, token_ids[above], before_root))
            above = parents[above]
        return torch.stack(columns, dim=1)

    def lists(self, row: int) -> tuple[list[Any], list[Any]]:
        """Token ids and parents of a row's nodes, on the host."""
        return self.token_ids[row].tolist(), self.parents[row].tolist()
