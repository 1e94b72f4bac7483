"""One step's rows, made of the sequences that take part, and what they get back.

B batch rows, P pages of the longest sequence, S drafter state width.
"""

import torch
from torch import Tensor

from furcate.decoding.drafters.proposer import DraftRows
from furcate.decoding.logits.processing import processing_of
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.sequence import NewTokens, Sequence
from furcate.decoding.step import PromptChunk, PromptResult, StepResult


def draft_rows(sequences: list[Sequence], device: torch.device) -> DraftRows:
    """Where these sequences stand."""
    longest = max(len(sequence.pages) for sequence in sequences)
    states = [sequence.state for sequence in sequences if sequence.state is not None]
    return DraftRows(
        # Without a proposer, sequences that have just joined have no state and older ones an empty one.
        states=torch.stack(states) if len(states) == len(sequences) else torch.empty(len(sequences), 0, device=device),
        root_ids=torch.tensor([sequence.root_id for sequence in sequences], device=device),
        cache_lengths=int32([sequence.cache_length for sequence in sequences], device),
        page_table=int32([sequence.pages + [0] * (longest - len(sequence.pages)) for sequence in sequences], device),
    )


def prompt_chunk(sequence: Sequence, length: int, device: torch.device) -> PromptChunk:
    """The next `length` tokens of a sequence that is not prefilled; its pages hold them."""
    start, token_ids = sequence.cache_length, sequence.token_ids
    end = start + length
    return PromptChunk(
        token_ids=torch.tensor([token_ids[start:end]], device=device),
        cache_lengths=int32([start], device),
        page_table=int32([sequence.pages], device),
        next_id=token_ids[end] if end < len(token_ids) else None,
    )


def sampling_rows(sequences: list[Sequence], vocab_size: int, device: torch.device) -> SamplingRows:
    """How these sequences' tokens are chosen."""
    params = [sequence.sampling for sequence in sequences]
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    limited = [k for k in top_k if k < vocab_size]
    top_p = [1.0 if p.top_p is None else p.top_p for p in params]
    min_p = [p.min_p or 0.0 for p in params]
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        seeds=torch.tensor([_signed(sequence.seed) for sequence in sequences], device=device),
        is_greedy=all(p.temperature == 0 for p in params),
        largest_top_k=max(limited) if limited else None,
        uses_top_p=min(top_p) < 1,
        min_p=torch.tensor(min_p, dtype=torch.float32, device=device) if max(min_p) > 0 else None,
        processing=processing_of([sequence.logits for sequence in sequences], device),
        returns_log_probs=any(p.returns_log_probs for p in params),
    )


def first_tokens(result: PromptResult) -> NewTokens:
    """A prompt's first token, on the host."""
    log_probs = [result.log_prob] if result.log_prob is not None else []
    return NewTokens(token_ids=[result.token_id], logits=[result.chosen_logit], log_probs=log_probs)


def new_tokens(result: StepResult) -> list[NewTokens]:
    """Each row's tokens of a step, on the host."""
    counts = result.num_tokens.tolist()
    token_ids, logits = result.token_ids.tolist(), result.chosen_logits.tolist()
    log_probs = result.log_probs.tolist() if result.log_probs is not None else [[]] * len(counts)
    return [
        NewTokens(token_ids=ids[:count], logits=values[:count], log_probs=row_log_probs[:count])
        for count, ids, values, row_log_probs in zip(counts, token_ids, logits, log_probs, strict=True)
    ]


def int32(values: list, device: torch.device) -> Tensor:
    """Lengths or page numbers as the passes want them."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what torch's int64 holds."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
