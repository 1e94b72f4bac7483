"""The counter generator: reproducible, batch-independent, below 1 after a float32 cast, and uniform.

Statistics use a fixed seed, so they cannot flake; bounds are 4 to 5 standard errors.
"""

import pytest
import torch

from furcate.decoding.randomness import Draw, node_uniforms, uniforms


def stream(seed: int, num_positions: int, draw: int = 0) -> torch.Tensor:
    return uniforms(torch.tensor([seed]), torch.arange(num_positions)[None], draw)[0]


def test_a_row_is_the_same_in_any_batch_and_order():
    seeds = torch.tensor([3, -7, 2**62])
    positions = torch.tensor([[0, 1], [5, 6], [9, 9]])
    whole = uniforms(seeds, positions, 1)
    flipped = uniforms(seeds.flip(0), positions.flip(0), 1)
    assert torch.equal(whole, flipped.flip(0))
    for row in range(3):
        assert torch.equal(whole[row], uniforms(seeds[row : row + 1], positions[row : row + 1], 1)[0])


def test_node_uniforms_are_keyed_by_node_not_by_the_number_of_nodes():
    seeds, positions = torch.tensor([1, 2]), torch.tensor([10, 20])
    few, many = (node_uniforms(seeds, positions, n, Draw.ACCEPT) for n in (3, 8))
    assert torch.equal(few, many[:, :3])
    assert many.unique().numel() == many.numel()


def test_numbers_of_different_draws_nodes_positions_and_seeds_differ():
    seeds = torch.arange(-20, 20).repeat_interleave(20)
    positions = torch.arange(20).repeat(40)
    drawn = [node_uniforms(seeds, positions, 8, draw) for draw in Draw]
    together = torch.stack(drawn).flatten()
    # 25,600 numbers of 53 bits: a chance collision has probability 4e-8, except at the clamp below 1 (1.5e-3).
    assert together.unique().numel() == together.numel()


def test_known_values_stay_the_same_between_versions():
    values = uniforms(torch.tensor([0, 1]), torch.tensor([[0, 1], [0, 1]]), 0)
    assert values.tolist() == [[0.6131064842878083, 0.33484685844401585], [0.27754364771580453, 0.07364816902764437]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_below_one_after_a_cast(dtype):
    numbers = stream(5, 2**22).to(dtype)
    assert 0 <= numbers.min() < numbers.max() < 1


def test_a_raw_number_that_float32_would_round_to_one_is_clamped():
    # One number in 2**24 exceeds 1 - 2**-24; this key, found by search, gives such a one.
    number = uniforms(torch.tensor([58]), torch.tensor([[412397]]), 0)
    assert number.item() == 1 - 2**-24
    assert number.float().item() < 1


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_moments_and_lag_correlation(seed):
    count = 200_000
    numbers = stream(seed, count)
    assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    centred = numbers - 0.5
    for lag in (1, 2, 3, 7, 64):
        assert abs((centred[lag:] * centred[:-lag]).mean() * 12) < 5 / count**0.5


@pytest.mark.parametrize("other", [{"seed": 8}, {"draw": 1}, {"seed": 7 + 2**32}])
def test_streams_of_neighbouring_keys_are_uncorrelated(other):
    count = 200_000
    one, two = stream(7, count) - 0.5, stream(other.get("seed", 7), count, other.get("draw", 0)) - 0.5
    assert abs((one * two).mean() * 12) < 5 / count**0.5


@pytest.mark.parametrize("axis", ["position", "seed", "draw"])
def test_pairs_fill_the_unit_square_evenly_along_every_axis(axis):
    count, bins = 160_000, 16
    counter = torch.arange(count)
    zeros = torch.zeros_like(counter)
    seeds, positions, draws = (counter if name == axis else zeros for name in ("seed", "position", "draw"))
    numbers = uniforms(seeds, positions[:, None], draws[:, None])[:, 0]
    cells = (numbers * bins).long()
    counts = torch.bincount(cells[0::2] * bins + cells[1::2], minlength=bins**2).double()
    expected = count / 2 / bins**2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = bins**2 - 1
    assert abs(chi_square - degrees) < 4.5 * (2 * degrees) ** 0.5
