"""Passes of the target and its drafter over a text that is known beforehand: one sequence, behind no scheduler.

B is 1 throughout; C tokens of a piece, F feature width, P pages, S drafter state width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.decoding.drafters.proposer import Committed, Proposer
from furcate.decoding.executors.executor import EngineExecutor


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """Some tokens of a text, the place of the first, and what the target made of them (None where no head reads it)."""

    token_ids: list[int]
    start: int
    features: Float[Tensor, "1 C F"] | None


def target_pieces(
    executor: EngineExecutor, token_ids: Sequence[int], page_table: Int32[Tensor, "1 P"]
) -> Iterator[TextPiece]:
    """Runs the target along a text, piece by piece; its K/V is cached in these pages."""
    size = executor.manifest.prefill_chunk_tokens
    for start in range(0, len(token_ids), size):
        piece = list(token_ids[start : start + size])
        steps = torch.arange(start, start + len(piece), dtype=torch.int32, device=executor.device)
        inputs = PassInputs(
            token_ids=torch.tensor([piece], device=executor.device),
            positions=steps[None],
            tree_mask=None,
            cache_lengths=steps[:1],
            page_table=page_table,
        )
        last = torch.full((1, 1), len(piece) - 1, device=executor.device)
        features = executor.target_pass(inputs, last).features
        yield TextPiece(token_ids=piece, start=start, features=features)


def committed(
    executor: EngineExecutor,
    piece: TextPiece,
    next_ids: Sequence[int],
    page_table: Int32[Tensor, "1 P"],
    *,
    is_prompt: bool,
) -> Committed:
    """A piece as its drafter is told of it; `next_ids` are the tokens after each of the piece's."""
    return Committed(
        features=piece.features,
        first_ids=torch.tensor(piece.token_ids[:1], device=executor.device),
        next_ids=torch.tensor([list(next_ids)], device=executor.device),
        counts=torch.tensor([len(piece.token_ids)], device=executor.device),
        cache_lengths=torch.tensor([piece.start], dtype=torch.int32, device=executor.device),
        page_table=page_table,
        is_prompt=is_prompt,
    )


def observe_prompt(
    executor: EngineExecutor,
    proposer: Proposer,
    prompt: Sequence[int],
    next_id: int,
    page_table: Int32[Tensor, "1 P"],
) -> Shaped[Tensor, "1 S"]:
    """The drafter's state after a prompt (one token at least); target and drafter cache it in these pages."""
    states = None
    for piece in target_pieces(executor, prompt, page_table):
        next_ids = [*prompt[piece.start + 1 :], next_id][: len(piece.token_ids)]
        states = proposer.observe(committed(executor, piece, next_ids, page_table, is_prompt=True))
    assert states is not None, "a prompt has at least one token"
    return states
