"""The coins of a running step: numbers from the counter generator, keyed by seed and place in the text.

B batch rows, N nodes, T trials, D depth, V vocabulary.
"""

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from furcate.decoding.randomness import Draw, node_uniforms
from furcate.decoding.sampling import race
from furcate.decoding.tree import Tree


class CounterCoins:
    """`Coins` for one step. A token picked at a place in the text always uses that place's own numbers.

    So sample-and-match emits the very text that plain sampling with the same seed emits, whatever trees it is offered.
    """

    def __init__(self, tree: Tree, seeds: Int64[Tensor, " B"], root_positions: Int64[Tensor, " B"]) -> None:
        num_trials = tree.token_ids.shape[1] if tree.draft_laws is None else tree.draft_laws.law_ids.shape[1]
        self._depths, self._seeds, self._root_positions = tree.depths, seeds, root_positions
        self._flips = node_uniforms(seeds, root_positions, num_trials, Draw.ACCEPT)

    def flip(self, trials: Int64[Tensor, " B"], probs: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """See `Coins`."""
        return self._flips.gather(1, trials[:, None]).squeeze(1).to(probs.dtype) < probs

    def first(self, order: Int64[Tensor, "B T"], probs: Float[Tensor, "B T"]) -> Int64[Tensor, " B"]:
        """See `Coins`."""
        succeeds = self._flips.gather(1, order).to(probs.dtype) < probs
        return order.gather(1, succeeds.byte().argmax(1, keepdim=True)).squeeze(1)

    def pick(self, nodes: Int64[Tensor, " B"], weights: Float[Tensor, "B V"]) -> Int64[Tensor, " B"]:
        """See `Coins`."""
        depths = self._depths.gather(1, nodes[:, None]).squeeze(1)
        return race(weights, self._seeds, self._root_positions + depths + 1)
