"""A step's rows filled up to a fixed number of rows and pages, for programs of fixed shape.

Rows that are added live on the scratch page alone, which belongs to no sequence, and start from the shortest live row: they
compute something valid, cheaply, and nobody reads it. Rows are independent, so the live ones' results do not change.

B batch rows, M rows after filling up, P pages of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from furcate.decoding.drafters.proposer import DraftRows
from furcate.decoding.sampling import SamplingRows

if TYPE_CHECKING:
    from furcate.decoding.step import StepResult, StepRows


def padded_rows(rows: StepRows, num_rows: int, num_pages: int, scratch_page: int) -> StepRows:
    """The rows, then copies of the shortest one on the scratch page: M rows of `num_pages` pages each."""
    draft, sampling = rows.draft, rows.sampling
    batch, device = len(draft.root_ids), draft.root_ids.device
    shortest = draft.cache_lengths.argmin().expand(num_rows - batch)
    sources = torch.cat([torch.arange(batch, device=device), shortest])
    table = torch.full((num_rows, num_pages), scratch_page, dtype=torch.int32, device=device)
    table[:batch, : draft.page_table.shape[1]] = draft.page_table
    return replace(
        rows,
        draft=DraftRows(
            states=_taken(draft.states, sources),
            root_ids=_taken(draft.root_ids, sources),
            cache_lengths=_taken(draft.cache_lengths, sources),
            page_table=table,
        ),
        sampling=_sampling(sampling, sources),
    )


def _sampling(sampling: SamplingRows, sources: Int64[Tensor, " M"]) -> SamplingRows:
    assert sampling.processing is None, "processing is made for the rows that it was given"
    return replace(
        sampling,
        temperature=_taken(sampling.temperature, sources),
        top_k=_taken(sampling.top_k, sources),
        top_p=_taken(sampling.top_p, sources),
        seeds=_taken(sampling.seeds, sources),
        min_p=None if sampling.min_p is None else _taken(sampling.min_p, sources),
    )


def _taken(values: Shaped[Tensor, "B ..."], sources: Int64[Tensor, " M"]) -> Shaped[Tensor, "M ..."]:
    return values.index_select(0, sources)


def row_tensors(rows: StepRows) -> list[Tensor]:
    """Every tensor that differs from step to step, in a fixed order."""
    draft, sampling = rows.draft, rows.sampling
    tensors = [draft.states, draft.root_ids, draft.cache_lengths, draft.page_table]
    tensors += [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seeds]
    return tensors if sampling.min_p is None else [*tensors, sampling.min_p]


def scratch_table(rows: StepRows, scratch_page: int) -> Int32[Tensor, "B P"]:
    """The page table of rows that may write nowhere else."""
    return torch.full_like(rows.draft.page_table, scratch_page)


def first_rows(result: StepResult, batch: int) -> StepResult:
    """A copy of the first `batch` rows: the next step of the same program overwrites the original."""
    kept = {name: value[:batch].clone() for name, value in vars(result).items() if isinstance(value, Tensor)}
    return replace(result, **kept)
