"""Drawing a node's children from the drafter's law.

R rows (one per node to expand), K children, V vocabulary. How many children a node gets must not depend on what is drawn:
fix the shape first, or keep the first ones drawn. Choosing among drawn tokens by their probability biases the text, whatever
rule verifies it. Seeds come from `randomness.node_seeds`, one per child.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.acceptance.order import strike
from furcate.decoding.sampling import race

FLOOR = 1e-30
"""Added to no probability that counts (it vanishes beside 1e-22 in float32), it leaves a uniform law over the tokens not
drawn yet once a law's own tokens have run out, so any number of different children can be drawn."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Children in the order they are to be tried, and the law that `DraftLaws.probs` must state for them."""

    token_ids: Int64[Tensor, "R K"]
    law: Float[Tensor, "R V"]


def draw(law: Float[Tensor, "R V"], seeds: Int64[Tensor, " R"]) -> Int64[Tensor, " R"]:
    """A token of each row's law, never one of weight zero. Rows need not sum to 1."""
    return race(law, seeds, torch.zeros_like(seeds))


def draw_with_replacement(law: Float[Tensor, "R V"], seeds: Int64[Tensor, "R K"]) -> Drawn:
    """Independent draws; repeats stay, each is a trial of its own."""
    tokens = [draw(law, seeds[:, k]) for k in range(seeds.shape[1])]
    return Drawn(token_ids=torch.stack(tokens, 1), law=law)


def draw_without_replacement(law: Float[Tensor, "R V"], seeds: Int64[Tensor, "R K"]) -> Drawn:
    """Draws that strike out what was drawn before: the law of Gumbel top-K."""
    remaining = floored = law.clamp(min=FLOOR)
    tokens = [draw(remaining, seeds[:, 0])]
    for k in range(1, seeds.shape[1]):
        remaining = strike(remaining, tokens[-1])
        tokens.append(draw(remaining, seeds[:, k]))
    return Drawn(token_ids=torch.stack(tokens, 1), law=floored)


def draw_mixed(law: Float[Tensor, "R V"], num_children: int, seeds: Int64[Tensor, " R"]) -> Drawn:
    """The num_children - 1 most probable tokens, then one drawn from the law without them (UniVer).

    The drawn one is tried last: on the models of the exact-law tests that keeps more than trying it first.
    """
    floored = law.clamp(min=FLOOR)
    picked = floored.topk(num_children - 1, dim=1).indices
    rest = floored.scatter(1, picked, 0.0)
    rest = rest.div_(rest.sum(1, keepdim=True))
    return Drawn(token_ids=torch.cat([picked, draw(rest, seeds)[:, None]], 1), law=rest)
