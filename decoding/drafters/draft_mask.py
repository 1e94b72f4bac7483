"""The ancestor words of a tree that is still being drafted, level by level.

B batch rows, K nodes of a level, W mask words.
"""

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from furcate.decoding.device_constants import device_constant


class DraftMask:
    """Keeps the mask words of the newest level; a word is added when the nodes drafted outgrow the last one."""

    def __init__(self) -> None:
        self.num_drafted = 0
        self._words: list[Int32[Tensor, "B K"]] = []

    def extend(self, parents: Int64[Tensor, "B K"]) -> Int32[Tensor, "B K W"]:
        """The words of K new nodes: those of their parents (places in the level above), and a bit for themselves."""
        words = [word.gather(1, parents) for word in self._words]
        num_new = parents.shape[1]
        num_words = -(-(self.num_drafted + num_new) // 32)
        words += [torch.zeros(parents.shape, dtype=torch.int32, device=parents.device)] * (num_words - len(words))
        own = self_bits(self.num_drafted, num_new, parents.device)
        self._words = [word | own[index] for index, word in enumerate(words)]
        self.num_drafted += num_new
        return torch.stack(self._words, dim=-1)


def self_bits(first: int, count: int, device: torch.device) -> Int32[Tensor, "W K"]:
    """Word w of the mask row that holds only node first + k itself, for k < count."""
    columns = range(first, first + count)
    num_words = -(-(first + count) // 32)
    rows = tuple(tuple(_signed(1 << (c % 32)) if c // 32 == w else 0 for c in columns) for w in range(num_words))
    return device_constant(rows, device, torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
