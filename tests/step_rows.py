"""Rows for a step without a scheduler, and the methods that steps are tested with."""

import torch

from furcate.builder.acceptance_config import Acceptance
from furcate.decoding.drafters.proposer import DraftRows
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.step import Step, StepRows

CASES = [
    ("eagle3", "dynamic:12/3/4", Acceptance.MATCH), ("eagle", "eagle_mc_sim_7b_63", Acceptance.TRAVERSAL),
    ("medusa", "chain:3", Acceptance.BLOCK), ("eagle3", "dynamic:12/2/3", Acceptance.UNIVER), (None, "single", Acceptance.MATCH),
]  # fmt: skip


def rows_of(step: Step, batch: int, device="cpu", **sampling) -> StepRows:
    """Rows behind 20 tokens, each on two pages of its own."""
    executor = step.executor
    state = torch.zeros(batch, 64, dtype=executor.dtype, device=device)
    if executor.head is not None and executor.head.kind == "model":
        state = torch.ones(batch, step.proposer.state_width, dtype=torch.int64, device=device)
    defaults = {
        "temperature": torch.zeros(batch, device=device), "top_k": torch.full((batch,), 300, device=device),
        "top_p": torch.ones(batch, device=device), "seeds": torch.arange(batch, device=device),
        "is_greedy": True, "largest_top_k": None, "uses_top_p": False,
    }  # fmt: skip
    return StepRows(
        draft=DraftRows(
            states=state,
            root_ids=torch.full((batch,), 7, device=device),
            cache_lengths=torch.full((batch,), 20, dtype=torch.int32, device=device),
            page_table=torch.arange(4 * batch, dtype=torch.int32, device=device).view(batch, 4),
        ),
        sampling=SamplingRows(**{**defaults, **sampling}),
    )
