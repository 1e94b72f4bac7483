"""Trees whose shape is fixed before any token is known: chains, choice lists, products, expansions.

B batch rows, N nodes. A node is named by its path of ranks: (0, 2) is the third most probable child of the most
probable child of the root, as in Medusa's and EAGLE's choice lists. Nodes are ordered by depth, then by path.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files

import torch
from jaxtyping import Int64
from torch import Tensor

from furcate.builder.errors import ConfigError
from furcate.builder.tree_paths import Path, expansion_paths, likeliest_paths
from furcate.decoding.tree import Tree, tree_from_parents


@dataclass(frozen=True)
class TreeShape:
    """A tree without tokens. `paths[n]` is node n's path of ranks; paths[0] = () is the root.

    Build one with the functions below; they check and order the paths.
    """

    paths: tuple[Path, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node above each node; 0 for the root."""
        index = {path: node for node, path in enumerate(self.paths)}
        return tuple(index[path[:-1]] for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges between each node and the root."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Each node's rank among its parent's candidates (0 is the most probable); 0 for the root."""
        return tuple(path[-1] if path else 0 for path in self.paths)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for a root alone."""
        return max(self.depths)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth; levels[0] is the root's."""
        return tuple(tuple(nodes) for _, nodes in itertools.groupby(range(self.num_nodes), self.depths.__getitem__))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children, in the order they are tried."""
        below: list[list[int]] = [[] for _ in self.paths]
        for node, parent in enumerate(self.parents[1:], start=1):
            below[parent].append(node)
        return tuple(map(tuple, below))

    @cached_property
    def max_trials(self) -> int:
        """The most children offered on one way from the root to a leaf."""
        offered = [len(self.children[0])]
        for node, parent in enumerate(self.parents[1:], start=1):
            offered.append(offered[parent] + len(self.children[node]))
        return max(offered)

    def tree(self, token_ids: Int64[Tensor, "B N"]) -> Tree:
        """The trees of this shape that hold `token_ids`. Index tensors are shared by all rows: do not write to them."""
        alone = _constants(self, token_ids.device)
        num_rows = token_ids.shape[0]
        return Tree(
            token_ids=token_ids,
            parents=alone.parents.expand(num_rows, -1),
            depths=alone.depths.expand(num_rows, -1),
            ancestor_mask=alone.ancestor_mask.expand(num_rows, -1, -1),
            num_nodes=alone.num_nodes.expand(num_rows),
            max_depth=self.max_depth,
            max_trials=self.max_trials,
            num_parents=max(self.parents) + 1,
        )


@lru_cache(maxsize=64)
def _constants(shape: TreeShape, device: torch.device) -> Tree:
    parents = torch.tensor([shape.parents], device=device)
    num_nodes = torch.tensor([shape.num_nodes], device=device)
    return tree_from_parents(torch.zeros_like(parents), parents, num_nodes, shape.max_depth)


def single_node_shape() -> TreeShape:
    """The root alone: a step with this tree is plain decoding."""
    return TreeShape(((),))


def chain_shape(length: int) -> TreeShape:
    """The root and `length` nodes below one another."""
    if length < 1:
        raise ConfigError(f"A chain of {length} drafted tokens was asked for; it needs 1 or more.")
    return TreeShape(tuple((0,) * depth for depth in range(length + 1)))


def expansion_shape(widths: Sequence[int]) -> TreeShape:
    """Every node of depth d has widths[d] children: SpecInfer's expansion configuration, such as [1, 1, 3, 1, 1]."""
    if not widths or min(widths) < 1:
        raise ConfigError(f"The expansion {list(widths)} is not allowed; give one or more widths of 1 or more.")
    return TreeShape(((), *expansion_paths(widths)))


def shape_from_choices(choices: Sequence[Sequence[int]]) -> TreeShape:
    """The shape of a choice list such as [[0], [1], [0, 0]]; the root is implied, any order is accepted.

    Raises ConfigError when a path is empty, repeated, holds anything but whole numbers >= 0, or lacks its parent.
    """
    paths: set[Path] = set()
    for choice in choices:
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice or not all(map(_is_rank, choice)):
            raise ConfigError(f"The tree choice {choice!r} is not allowed; each is a list of one or more ranks >= 0.")
        if tuple(choice) in paths:
            raise ConfigError(f"The tree choice {list(choice)} is given twice; list every path once.")
        paths.add(tuple(choice))
    for path in sorted(paths):
        if len(path) > 1 and path[:-1] not in paths:
            raise ConfigError(f"The tree choice {list(path)} has no parent; add {list(path[:-1])} to the choices.")
    return TreeShape(((), *sorted(paths, key=lambda path: (len(path), path))))


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def shipped_shapes() -> tuple[str, ...]:
    """Names of the choice lists that come with furcate: those of Medusa's and EAGLE's repositories."""
    folder = files("furcate.decoding") / "choices"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def named_shape(name: str) -> TreeShape:
    """The shipped choice list of that name: Medusa's `medusa_choices.py` names, and eagle_mc_sim_7b_63 for EAGLE's.

    EAGLE's list has 25 nodes below the root; its upstream name is the same as Medusa's 63-node mc_sim_7b_63.
    """
    if name not in shipped_shapes():
        raise ConfigError(f"There is no tree named {name!r}; choose one of {', '.join(shipped_shapes())}.")
    return shape_from_choices(json.loads((files("furcate.decoding") / "choices" / f"{name}.json").read_text()))


def shape_from_accuracies(accuracies: Sequence[Sequence[float]], budget: int) -> TreeShape:
    """The tree of at most `budget` nodes, root included, with the most tokens expected to be accepted.

    `accuracies[d][r]` is the measured chance that the candidate of rank r at depth d + 1 is the target's token. Where
    depths succeed independently a path's chance is their product, and the most probable paths are the optimal tree
    (Medusa grows its lists this way). Paths of chance 0 are left out even when the budget is not spent.
    """
    return cartesian_shape([len(ranks) for ranks in accuracies], accuracies, budget)


def cartesian_shape(top_s: Sequence[int], accuracies: Sequence[Sequence[float]], budget: int) -> TreeShape:
    """The product of every depth's first `top_s[d]` ranks, cut to its `budget` most probable nodes (root included)."""
    _check_accuracies(top_s, accuracies, budget)
    return shape_from_choices(likeliest_paths(top_s, accuracies, budget)[1:])


def _check_accuracies(top_s: Sequence[int], accuracies: Sequence[Sequence[float]], budget: int) -> None:
    if budget < 1:
        raise ConfigError(f"A tree of {budget} nodes was asked for; the root alone is 1, so give 1 or more.")
    if len(top_s) > len(accuracies):
        raise ConfigError(
            f"The product has {len(top_s)} depths but accuracies for {len(accuracies)}; give one row each."
        )
    for depth, (width, ranks) in enumerate(zip(top_s, accuracies, strict=False), start=1):
        if not 1 <= width <= len(ranks):
            raise ConfigError(
                f"The product takes {width} candidates at depth {depth} but accuracies cover {len(ranks)} ranks; "
                "take between 1 and that many."
            )
        if not all(0 <= accuracy <= 1 for accuracy in ranks):
            raise ConfigError(f"Accuracies at depth {depth} are {list(ranks)}; each must lie between 0 and 1.")
