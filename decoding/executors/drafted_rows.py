"""The nodes that a head, or a draft model, has drafted so far, to run each level of a tree with the levels before it.

Rows that were run before are run again with the same inputs and write the same K/V. B batch, N nodes, H hidden, W mask words.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from furcate.builder.network.inputs import PassInputs


class DraftedRows:
    """Remembers the rows of the tree that is being drafted; a pass with node_offset 0 begins another."""

    def __init__(self) -> None:
        self._hidden: Tensor | None = None
        self._inputs: PassInputs | None = None

    def with_earlier(
        self, hidden: Float[Tensor, "B N H"] | None, inputs: PassInputs
    ) -> tuple[Float[Tensor, "B N H"] | None, PassInputs]:
        """(hidden, inputs) of all nodes of the tree so far, those of this level last, at node offset 0.

        A draft model's nodes have no hidden state: None stays None.
        """
        if inputs.tree_mask is None:
            return hidden, inputs
        if inputs.node_offset > 0:
            earlier, num_words = self._inputs, inputs.tree_mask.shape[2]
            assert earlier is not None and earlier.tree_mask is not None
            assert earlier.token_ids.shape[1] == inputs.node_offset, "levels of one tree follow one another"
            if hidden is not None:
                assert self._hidden is not None
                hidden = torch.cat([self._hidden, hidden], dim=1)
            masks = [padded_words(earlier.tree_mask, num_words), inputs.tree_mask]
            inputs = replace(
                inputs,
                token_ids=torch.cat([earlier.token_ids, inputs.token_ids], dim=1),
                positions=torch.cat([earlier.positions, inputs.positions], dim=1),
                tree_mask=torch.cat(masks, dim=1),
                node_offset=0,
            )
        self._hidden, self._inputs = hidden, inputs
        return hidden, inputs


def chain_words(batch: int, num_nodes: int, device: torch.device) -> Int32[Tensor, "B N W"]:
    """Ancestor words of a chain: node i attends nodes 0 .. i."""
    node = torch.arange(num_nodes, device=device)[:, None]
    word = torch.arange(-(-num_nodes // 32), device=device)[None]
    count = (node + 1 - 32 * word).clamp(0, 32)
    # int32 holds the word's bits: 2^31 and above are negative.
    bits = (1 << count.long()) - 1
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().expand(batch, -1, -1)


def fitting_words(words: Int32[Tensor, "B N W"], num_nodes: int) -> Int32[Tensor, "B N W"]:
    """Exactly ceil(num_nodes / 32) words, as the profiles want them."""
    wanted = -(-num_nodes // 32)
    return padded_words(words, wanted)[:, :, :wanted]


def padded_words(words: Int32[Tensor, "B N W"], num_words: int) -> Int32[Tensor, "B N W"]:
    """At least `num_words` words, the new ones empty."""
    missing = num_words - words.shape[2]
    return words if missing <= 0 else torch.nn.functional.pad(words, (0, missing))
