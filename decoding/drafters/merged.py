"""Several heads draft, each its own tree, and the union is verified (SpecInfer's merge, arXiv 2305.09781).

Every drafter keeps a state and a cache of its own; their pages are the sequence's. What they draw must be independent, so each
takes numbers of its own. B batch rows, N nodes, S bytes of all drafters' states together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import UInt8
from torch import Tensor

from furcate.decoding.drafters.proposer import Committed, Draft, DraftRows, Proposer
from furcate.decoding.merged_tree import merge_trees
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.tree import Tree


@dataclass(frozen=True)
class _Layout:
    """Where one drafter's state lies among the bytes of all, and what it is."""

    first: int
    end: int
    dtype: torch.dtype


class MergedProposer:
    """Proposers side by side. A sequence's state is the bytes of theirs: token ids and features share no other dtype."""

    def __init__(self, parts: Sequence[Proposer], feature_widths: Sequence[int]) -> None:
        self.parts = list(parts)
        self.feature_widths = list(feature_widths)
        self.num_held_slots = max(part.num_held_slots for part in parts)
        self.target_token_ids = parts[0].target_token_ids
        self.target_laws = parts[0].target_laws
        self._layouts: list[_Layout] = []

    def start(self, rows: DraftRows) -> Draft:
        """Not for several drafters: a `MergedGrower` starts each of them on its own rows."""
        raise AssertionError("each drafter of a merged tree starts its own draft")

    def observe(self, committed: Committed) -> UInt8[Tensor, "B S"]:
        """The new states; each drafter reads its own features."""
        pieces: list[Tensor] = []
        first, self._layouts = 0, []
        for part, features in zip(self.parts, self._features(committed), strict=True):
            state = part.observe(replace(committed, features=features)).contiguous()
            pieces.append(state.view(torch.uint8))
            self._layouts.append(_Layout(first, first + pieces[-1].shape[1], state.dtype))
            first = self._layouts[-1].end
        return torch.cat(pieces, 1)

    def _features(self, committed: Committed) -> Sequence[Tensor | None]:
        if committed.features is None:
            return [None] * len(self.parts)
        pieces = committed.features.split(self.feature_widths, dim=2)
        return [piece if piece.shape[2] > 0 else None for piece in pieces]

    def states_of(self, states: UInt8[Tensor, "B S"]) -> list[Tensor]:
        """Each drafter's own states."""
        return [states[:, own.first : own.end].contiguous().view(own.dtype) for own in self._layouts]

    def rows_of(self, rows: DraftRows) -> list[DraftRows]:
        """The same sequences as each drafter knows them."""
        return [replace(rows, states=states) for states in self.states_of(rows.states)]

    def num_behind(self, state: UInt8[Tensor, " S"]) -> int:
        """Committed tokens whose cached rows a drafter will still write anew: a draft model's, up to its newest."""
        pairs = zip(self.parts, self.states_of(state[None]), strict=True)
        return max((int(own[0, 0]) - 1 for part, own in pairs if part.num_held_slots > 0), default=0)


class MergedGrower:
    """Grows the tree of every drafter and merges them."""

    def __init__(self, parts: Sequence, max_depth: int) -> None:
        self.parts = list(parts)
        self.max_depth = max_depth
        self.num_nodes = 1 + sum(part.num_nodes - 1 for part in parts)
        self.num_cached_nodes = max(part.num_cached_nodes for part in parts)

    def grow(self, proposer: Proposer | None, rows: DraftRows, sampling: SamplingRows) -> Tree:
        """The merged trees of these sequences; on a CPU without the columns that no row uses."""
        assert isinstance(proposer, MergedProposer), "several heads draft together"
        own_rows = zip(self.parts, proposer.parts, proposer.rows_of(rows), strict=True)
        merged = merge_trees([part.grow(own, of_own, sampling) for part, own, of_own in own_rows])
        return trimmed(merged) if rows.root_ids.device.type == "cpu" else merged


def trimmed(tree: Tree) -> Tree:
    """The tree without the columns that are padding in every row."""
    num_nodes = int(tree.num_nodes.max())
    laws = tree.draft_laws
    return replace(
        tree,
        token_ids=tree.token_ids[:, :num_nodes],
        parents=tree.parents[:, :num_nodes],
        depths=tree.depths[:, :num_nodes],
        ancestor_mask=tree.ancestor_mask[:, :num_nodes, :num_nodes],
        num_parents=min(tree.num_parents, num_nodes),
        draft_laws=None if laws is None else replace(laws, is_drawn=laws.is_drawn[:, :num_nodes]),
    )
