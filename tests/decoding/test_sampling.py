"""The target's law after top-k and top-p: by sorting, ties included, and the same whoever shares the batch."""

import pytest
import torch
from torch import Tensor

from furcate.decoding.sampling import SamplingRows, target_law

NUM_TOKENS = 40


def rows_of(settings: list[tuple[int, float]]) -> SamplingRows:
    """Rows at temperature 0.8 with these top_k (0: none) and top_p."""
    top_k = [k or NUM_TOKENS for k, _ in settings]
    limited = [k for k in top_k if k < NUM_TOKENS]
    return SamplingRows(
        temperature=torch.full((len(settings),), 0.8),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor([p for _, p in settings]),
        seeds=torch.zeros(len(settings), dtype=torch.int64),
        is_greedy=False,
        largest_top_k=max(limited) if limited else None,
        uses_top_p=any(p < 1 for _, p in settings),
    )


def sorted_law(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The law by its definition, in float64; equal probabilities stay or go together."""
    values = (logits.double() / 0.8).softmax(-1)
    if top_k:
        values = values * (values >= values.sort(descending=True).values[top_k - 1])
        values = values / values.sum()
    kept, total = torch.zeros_like(values), 0.0
    for value in values.unique().flip(0):
        if top_p < 1 and total >= top_p:
            break
        kept, total = kept + values * (values == value), total + values[values == value].sum()
    return kept / kept.sum()


SETTINGS = [(6, 0.9), (3, 0.5), (6, 1.0), (0, 0.7), (1, 0.3), (39, 0.99), (6, 0.999999)]


@pytest.mark.parametrize("levels", [1000, 5], ids=["distinct", "tied"])
def test_the_law_is_what_sorting_gives_alone_and_in_company(levels):
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = torch.randint(levels, (len(SETTINGS), NUM_TOKENS), generator=generator) * (8 / levels)
        together = target_law(logits, rows_of(SETTINGS))
        for row, setting in enumerate(SETTINGS):
            alone = target_law(logits[row : row + 1], rows_of([setting]))
            assert torch.equal(alone[0] > 0, together[row] > 0)
            # float32 rounds probabilities to 6e-8 of their value; sums of 40 of them differ by the order of adding.
            assert (alone[0] - together[row]).abs().max() < 1e-6
            assert (alone[0] - sorted_law(logits[row], *setting)).abs().max() < 1e-6
