"""The target's law at a node, and the token drawn from it.

B batch rows, N nodes, V vocabulary. Numbers of (seed, position) alone decide the token at a position, so that a request's text
depends on its seed alone: not on its batch, nor on the tree that happened to be drafted.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from furcate.decoding.logits.processing import LogitsProcessing
from furcate.decoding.randomness import Draw, node_uniforms
from furcate.decoding.tree import Tree

_BISECTIONS = 31
_RUN = 256
"""Neighbouring tokens that race together: a row needs V / 256 + 256 numbers, not V."""


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How each row's tokens are chosen. Rows with temperature 0 take the argmax.

    top_k [B] is V where unused, top_p [B] is 1 and min_p [B] is 0 where unused; the host-side fields, and None, say which
    work no row needs.
    """

    temperature: Float[Tensor, " B"]
    top_k: Int64[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    seeds: Int64[Tensor, " B"]
    is_greedy: bool
    largest_top_k: int | None
    uses_top_p: bool
    min_p: Float[Tensor, " B"] | None = None
    processing: LogitsProcessing | None = None
    returns_log_probs: bool = False


def target_law(logits: Float[Tensor, "B V"], rows: SamplingRows) -> Float[Tensor, "B V"]:
    """Float32 probabilities after temperature, then top-k, then top-p, then min-p; each row sums to 1.

    Tokens tied with the last one kept are kept too. Rows with temperature 0 get the law at temperature 1 (unused). A NaN
    among a row's logits makes its whole law NaN.
    """
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = logits.float() / temperature[:, None]
    is_limited, top_ids = rows.top_k < scaled.shape[1], None
    if rows.largest_top_k is not None:
        top, top_ids = scaled.topk(min(rows.largest_top_k, scaled.shape[1]), dim=-1)
        limits = top.gather(1, (rows.top_k.clamp(max=top.shape[1]) - 1)[:, None])
        scaled = scaled.masked_fill(is_limited[:, None] & (scaled < limits), -torch.inf)
    law = scaled.softmax(-1)
    if rows.uses_top_p:
        law = law * (law >= _nucleus_thresholds(law, rows.top_p, is_limited, top_ids)[:, None])
        law = law / law.sum(-1, keepdim=True)
    if rows.min_p is not None:
        law = law * (law >= rows.min_p[:, None] * law.amax(-1, keepdim=True))
        law = law / law.sum(-1, keepdim=True)
    return law


def _nucleus_thresholds(
    law: Float[Tensor, "B V"],
    top_p: Float[Tensor, " B"],
    is_limited: Bool[Tensor, " B"],
    top_ids: Int64[Tensor, "B K"] | None,
) -> Float[Tensor, " B"]:
    """Each row's threshold: found among its top-k where it has one, whoever shares the batch, else by bisection."""
    if top_ids is None:
        return _nucleus_threshold(law, top_p)
    top = law.gather(1, top_ids)
    is_short = top.double().cumsum(1) < top_p[:, None]
    # Tokens tied with the last of the top-k are in the law but not in the list: then its value is the threshold.
    short = top.gather(1, is_short.sum(1, keepdim=True).clamp(max=top.shape[1] - 1)).squeeze(1)
    short = torch.where(top_p < 1, short, 0.0)
    if law.device.type == "cpu" and is_limited.all():
        return short  # a look costs nothing on a CPU; a captured graph bisects too
    return torch.where(is_limited, short, _nucleus_threshold(law, top_p))


def _nucleus_threshold(law: Float[Tensor, "B V"], top_p: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """The largest probability t such that the tokens of probability >= t hold at least top_p of the mass.

    Non-negative floats order as their bits do, so bisecting the bits finds t exactly, without a sort.
    """
    low = torch.zeros(len(law), dtype=torch.int32, device=law.device)
    high = law.amax(-1).view(torch.int32)
    for _ in range(_BISECTIONS):
        middle = low + (high - low + 1) // 2
        mass = (law * (law >= middle.view(torch.float32)[:, None])).sum(-1)
        is_enough = mass >= top_p
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle - 1)
    return torch.where(top_p < 1, low.view(torch.float32), 0.0)


def race(law: Float[Tensor, "B V"], seeds: Int64[Tensor, " B"], positions: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """The token that the law draws at a position of a seed's text; never one of weight zero. Rows need not sum to 1.

    An exponential race (Gumbel-max): of numbers e ~ Exp(1) the smallest e / weight wins, first among runs of neighbouring tokens,
    then inside the run that won. Unlike a cumulated law that one number cuts, where rounding moves every cut behind it, a
    law that another batch shape rounded otherwise gives the same token unless two weighed numbers all but tie.
    """
    num_rows, num_tokens = law.shape
    num_runs = -(-num_tokens // _RUN)
    runs = F.pad(law, (0, num_runs * _RUN - num_tokens)).view(num_rows, num_runs, _RUN)
    times = -torch.log1p(-node_uniforms(seeds, positions, num_runs + _RUN, Draw.TOKEN))
    run = _first(times[:, :num_runs], runs.sum(-1, dtype=torch.float64))
    weights = runs.gather(1, run[:, None, None].expand(-1, 1, _RUN)).squeeze(1)
    return run * _RUN + _first(times[:, num_runs:], weights)


def _first(times: Float64[Tensor, "B K"], weights: Float[Tensor, "B K"]) -> Int64[Tensor, " B"]:
    """Who is first when each runs `weights` times as fast; weight zero never arrives."""
    return torch.where(weights > 0, times / weights, torch.inf).argmin(-1)


def choose(logits: Float[Tensor, "B V"], rows: SamplingRows, positions: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """The token at `positions` (index in prompt plus answer) of each row, by argmax or by its law.

    A row with a NaN logit gets the first token whose logit is NaN.
    """
    greedy = logits.max(-1).indices
    if rows.is_greedy:
        return greedy
    law = target_law(logits, rows)
    drawn = race(law, rows.seeds, positions)
    return torch.where((rows.temperature > 0) & (law[:, 0] >= 0), drawn, greedy)


def choose_in_tree(
    tree: Tree, logits: Float[Tensor, "B N V"], rows: SamplingRows, cache_lengths: Int64[Tensor, " B"]
) -> Int64[Tensor, "B N"]:
    """The token the target chooses after each node: after every node for the argmax, else after those on the path it takes.

    The token after a node of depth d has position cache_length + d + 1. Nodes off the path keep -1, which matches nothing.
    """
    if rows.is_greedy:
        return logits.max(-1).indices
    batch = torch.arange(len(logits), device=logits.device)
    choices = torch.full_like(tree.token_ids, -1)
    node = torch.zeros_like(batch)
    is_on_path = torch.ones_like(batch, dtype=torch.bool)
    columns = torch.arange(tree.token_ids.shape[1], device=logits.device)
    for depth in range(tree.max_depth + 1):
        tokens = choose(logits[batch, node], rows, cache_lengths + depth + 1)
        choices[batch, node] = torch.where(is_on_path, tokens, choices[batch, node])
        matches = (tree.token_ids == tokens[:, None]) & (tree.parents == node[:, None]) & tree.is_node & (columns > 0)
        is_on_path = is_on_path & matches.any(-1)
        if logits.device.type == "cpu" and not is_on_path.any():
            break  # on a CPU a look costs nothing; a captured graph walks every level
        node = torch.where(is_on_path, matches.int().argmax(-1), node)
    return choices
