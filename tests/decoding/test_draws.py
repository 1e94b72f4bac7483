"""Drawing children: the law over whole draws, the stated law, and that rounding does not move them."""

import itertools

import pytest
import torch
from continuations import chi_square_p

from furcate.decoding.draws import draw_mixed, draw_with_replacement, draw_without_replacement
from furcate.decoding.randomness import Draw, node_seeds

LAW = torch.tensor([0.5, 0.125, 0.25, 0.125], dtype=torch.float64)
NUM_DRAWS = 50_000


def seeds_of(num_rows: int, num_children: int) -> torch.Tensor:
    return node_seeds(torch.arange(num_rows), torch.full((num_rows,), 7), num_children, Draw.DRAFT)


def test_without_replacement_is_the_law_of_successive_draws():
    drawn = draw_without_replacement(LAW.expand(NUM_DRAWS, -1), seeds_of(NUM_DRAWS, 2))
    law = {(a, b): (LAW[a] * LAW[b] / (1 - LAW[a])).item() for a, b in itertools.permutations(range(4), 2)}
    assert chi_square_p(drawn.token_ids, law) > 0.001


def test_with_replacement_draws_are_independent():
    drawn = draw_with_replacement(LAW.expand(NUM_DRAWS, -1), seeds_of(NUM_DRAWS, 2))
    law = {(a, b): (LAW[a] * LAW[b]).item() for a, b in itertools.product(range(4), repeat=2)}
    assert chi_square_p(drawn.token_ids, law) > 0.001


def test_mixed_picks_the_most_probable_and_draws_the_last_from_the_rest():
    drawn = draw_mixed(LAW.expand(NUM_DRAWS, -1), 3, seeds_of(NUM_DRAWS, 1)[:, 0])
    assert (drawn.token_ids[:, :2] == torch.tensor([0, 2])).all()
    assert chi_square_p(drawn.token_ids[:, 2:], {(1,): 0.5, (3,): 0.5}) > 0.001
    assert torch.allclose(drawn.law[0], torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_law_that_runs_out_goes_on_evenly_over_tokens_not_drawn_yet(dtype):
    law = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=dtype).expand(9_000, -1)
    drawn = draw_without_replacement(law, seeds_of(9_000, 2))
    assert chi_square_p(drawn.token_ids, {(1, 0): 1 / 3, (1, 2): 1 / 3, (1, 3): 1 / 3}) > 0.001
    assert (drawn.law > 0).all()
    everything = draw_without_replacement(law[:1], seeds_of(1, 4))
    assert sorted(everything.token_ids[0].tolist()) == [0, 1, 2, 3]


def test_children_differ_over_a_large_vocabulary_in_float32():
    generator = torch.Generator().manual_seed(1)
    law = torch.randn(8, 50_000, generator=generator).mul(6).softmax(1)
    drawn = draw_without_replacement(law, seeds_of(8, 10))
    assert all(len(set(row)) == 10 for row in drawn.token_ids.tolist())


@pytest.mark.parametrize(
    "draw", [draw_with_replacement, draw_without_replacement, lambda law, s: draw_mixed(law, 4, s[:, 0])]
)
def test_rounding_of_another_batch_shape_does_not_move_children(draw):
    # A draft's laws, as another batch shape rounds them: a text of a seed must not depend on its company.
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(200, 8_192, generator=generator)
    rounded = logits * (1 + 1e-5 * torch.randn(logits.shape, generator=generator))
    seeds = seeds_of(200, 4)
    one, other = draw(logits.softmax(-1), seeds), draw(rounded.softmax(-1), seeds)
    assert (one.token_ids != other.token_ids).sum() <= 1
