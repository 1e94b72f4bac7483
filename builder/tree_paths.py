"""The node paths of shapes that are computed: expansions, and the most probable nodes of a product.

A node is named by its path of ranks: (0, 2) is the third candidate below the first candidate of the root.
"""

import heapq
import itertools
from collections.abc import Sequence

Path = tuple[int, ...]


def expansion_paths(widths: Sequence[int]) -> list[Path]:
    """All nodes, without the root, of the tree in which every node of depth d has widths[d] children."""
    levels = (itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
    return list(itertools.chain.from_iterable(levels))


def likeliest_paths(top_s: Sequence[int], accuracies: Sequence[Sequence[float]], budget: int) -> list[Path]:
    """The `budget` most probable nodes, the root () first, of the product of every depth's first top_s[d] ranks.

    accuracies[d][r] is the chance that rank r is right at depth d + 1; a path's chance is their product. Nodes of chance 0 are
    left out even when the budget is not spent.
    """
    paths: list[Path] = []
    # Largest chance first; ties by path, so that the result does not depend on the order of insertion.
    frontier: list[tuple[float, Path]] = [(-1.0, ())]
    while frontier and len(paths) < budget:
        cost, path = heapq.heappop(frontier)
        paths.append(path)
        if len(path) < len(top_s):
            for rank, accuracy in enumerate(accuracies[len(path)][: top_s[len(path)]]):
                if accuracy > 0:
                    heapq.heappush(frontier, (cost * accuracy, (*path, rank)))
    return paths
