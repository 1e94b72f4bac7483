"""The target's law after top-k and top-p, and the token drawn from it: exact, and the same however the batch rounded."""

import pytest
import torch
from continuations import chi_square_p
from torch import Tensor

from furcate.decoding.randomness import Draw, uniforms
from furcate.decoding.sampling import SamplingRows, race, target_law

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


def test_a_race_draws_from_its_law_across_runs_and_inside_them():
    num_tokens, num_draws = 700, 60_000  # three runs of 256, the last one padded
    law = torch.rand(num_tokens, generator=torch.Generator().manual_seed(1)) ** 4
    law[100:400] = 0.0
    law[300], law[699] = 40.0, 25.0
    seeds = torch.arange(num_draws)
    tokens = race(law.expand(num_draws, -1), seeds, torch.full_like(seeds, 17))
    probs = (law / law.sum()).tolist()
    # Of tokens of probability zero none may come: they are not in the law that the samples are held against.
    assert chi_square_p(tokens[:, None], {(token,): prob for token, prob in enumerate(probs) if prob > 0}) > 0.001


def test_a_race_of_weights_does_not_depend_on_their_sum_or_on_the_batch():
    law = torch.rand(50, 300, generator=torch.Generator().manual_seed(2))
    seeds, positions = torch.arange(50), torch.arange(50) * 3
    together = race(law, seeds, positions)
    assert torch.equal(race(law * 8, seeds, positions), together)
    alone = [race(law[row : row + 1], seeds[row : row + 1], positions[row : row + 1]) for row in range(50)]
    assert torch.equal(torch.cat(alone), together)


def cut(law: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """What a race replaces: the token where the cumulated law passes a number in [0, 1)."""
    return torch.searchsorted(law.double().cumsum(-1), numbers[:, None], right=True)[:, 0]


def test_rounding_of_another_batch_shape_does_not_move_draws_in_a_wide_tail():
    # 49,152 tokens of which most weigh next to nothing, as a language model's do at temperature 1.
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(20, 49_152, generator=generator)
    rounded = logits * (1 + 1e-5 * torch.randn(logits.shape, generator=generator))
    one, other = logits.softmax(-1), rounded.softmax(-1)
    num_moved = num_moved_cuts = 0
    for round_ in range(50):
        seeds = torch.arange(20) + 20 * round_
        positions = torch.full_like(seeds, round_)
        num_moved += int((race(one, seeds, positions) != race(other, seeds, positions)).sum())
        numbers = uniforms(seeds, positions, Draw.TOKEN)
        num_moved_cuts += int((cut(one, numbers) != cut(other, numbers)).sum())
    # 1000 draws: a race is moved where two scores lie within 1e-4, a cut where it lies in any sliver that moved.
    assert num_moved <= 2
    assert num_moved_cuts > 20
