"""Typical acceptance (Medusa, arXiv 2401.10774): keeps what the target finds plausible. The text's law is NOT the target's.

B batch rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.order import table_rows
from furcate.decoding.acceptance.rule import Coins
from furcate.decoding.tree import DraftKind, Tree


@dataclass(frozen=True)
class Typical:
    """A token x of law p is accepted while p(x) > min(threshold, alpha * exp(-entropy of p)).

    Of the accepted paths the longest is kept, of equally long ones the most probable. The bonus is the argmax.
    """

    threshold: float = 0.09
    alpha: float = 0.3
    name: str = "typical"
    is_lossless: bool = False
    kinds: frozenset[DraftKind] = frozenset(DraftKind)

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`; decides without a coin."""
        order = torch.arange(target.shape[1], device=target.device)
        limits = (self.alpha * (-torch.special.entr(target).sum(-1)).exp()).clamp(max=self.threshold)
        chances = target.flatten(1).gather(1, tree.parents * target.shape[2] + tree.token_ids)
        is_off = (chances <= limits.gather(1, tree.parents)) & (order > 0)
        is_on = tree.is_node & ~(tree.ancestor_mask & is_off[:, None, :]).any(-1)
        depths = torch.where(is_on, tree.depths, -1)
        is_longest = depths == depths.amax(1, keepdim=True)
        log_chances = torch.where(is_on & (order > 0), chances, 1.0).log()
        path_log_chances = (tree.ancestor_mask * log_chances[:, None, :]).sum(-1)
        last_nodes = torch.where(is_longest, path_log_chances, -torch.inf).argmax(1)
        return accept_path_to(tree, last_nodes, table_rows(target, last_nodes).argmax(1))
