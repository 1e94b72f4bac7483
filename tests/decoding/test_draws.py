"""Drawing children: the law over whole draws by the measure of the numbers that give it, and the stated law."""

import itertools

import pytest
import torch

from furcate.decoding.draws import draw_mixed, draw_with_replacement, draw_without_replacement

LAW = torch.tensor([0.5, 0.125, 0.25, 0.125], dtype=torch.float64)


def grid(num_numbers: int, steps: int) -> torch.Tensor:
    """Centres of a regular grid over the unit cube, [steps ** num_numbers, num_numbers]."""
    centres = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    return torch.cartesian_prod(*[centres] * num_numbers).view(-1, num_numbers)


def shares(token_ids: torch.Tensor) -> dict[tuple[int, ...], float]:
    rows = [tuple(row) for row in token_ids.tolist()]
    return {draw: rows.count(draw) / len(rows) for draw in set(rows)}


def test_without_replacement_is_the_law_of_successive_draws():
    # 168 steps: thresholds of all first and second draws (eighths, sixths and sevenths) fall between centres.
    numbers = grid(2, 168)
    drawn = draw_without_replacement(LAW.expand(len(numbers), -1), numbers)
    expected = {(a, b): LAW[a] * LAW[b] / (1 - LAW[a]) for a, b in itertools.permutations(range(4), 2)}
    found = shares(drawn.token_ids)
    assert found.keys() == expected.keys()
    for pair, share in expected.items():
        assert found[pair] == pytest.approx(share.item(), abs=1e-12)


def test_with_replacement_draws_are_independent():
    numbers = grid(2, 8)
    drawn = draw_with_replacement(LAW.expand(len(numbers), -1), numbers)
    found = shares(drawn.token_ids)
    for a, b in itertools.product(range(4), repeat=2):
        assert found[(a, b)] == pytest.approx((LAW[a] * LAW[b]).item(), abs=1e-12)


def test_mixed_picks_the_most_probable_and_draws_the_last_from_the_rest():
    numbers = grid(1, 16)[:, 0]
    drawn = draw_mixed(LAW.expand(16, -1), 3, numbers)
    assert (drawn.token_ids[:, :2] == torch.tensor([0, 2])).all()
    assert shares(drawn.token_ids[:, 2:]) == {(1,): 0.5, (3,): 0.5}
    assert torch.allclose(drawn.law[0], torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_law_that_runs_out_goes_on_evenly_over_tokens_not_drawn_yet(dtype):
    law = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=dtype).expand(9, -1)
    numbers = grid(2, 3)
    drawn = draw_without_replacement(law, numbers)
    assert shares(drawn.token_ids) == pytest.approx({(1, 0): 1 / 3, (1, 2): 1 / 3, (1, 3): 1 / 3})
    assert (drawn.law > 0).all()
    everything = draw_without_replacement(law[:1], torch.full((1, 4), 0.999, dtype=torch.float64))
    assert sorted(everything.token_ids[0].tolist()) == [0, 1, 2, 3]


def test_children_differ_over_a_large_vocabulary_in_float32():
    generator = torch.Generator().manual_seed(1)
    law = torch.randn(8, 50_000, generator=generator).mul(6).softmax(1)
    numbers = torch.rand(8, 10, generator=generator, dtype=torch.float64)
    drawn = draw_without_replacement(law, numbers)
    assert all(len(set(row)) == 10 for row in drawn.token_ids.tolist())
