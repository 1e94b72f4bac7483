"""The time of passes over n nodes, measured: what tuning and adaptive budgets reckon with. N nodes, K drafted nodes."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.decoding.drafters.proposer import DraftRows, Proposer
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.known_text import observe_prompt
from furcate.decoding.tree import Tree, pack_mask
from furcate.decoding.tree_shape import expansion_shape, single_node_shape

NUM_REPEATS = 7
BATCH = 8
"""Sequences of the pass that shows what a batch costs beside its nodes."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Milliseconds, undisturbed: of the target's pass over n nodes, and of a draft pass over k nodes (k = 0: starting a draft).

    Both tables are of one sequence. Nodes of several cost more than as many of one: each sequence has its own cache to attend.
    """

    verify_ms: dict[int, float]
    draft_ms: dict[int, float]
    verify_sequence_ms: float = 0.0
    """What each further sequence of a batch adds to a target pass, beside its nodes."""
    draft_sequence_ms: float = 0.0
    """The same of a draft pass."""

    def verify(self, num_nodes: int, batch: int = 1) -> float:
        """The target's pass over this many nodes of so many sequences, between measured sizes in proportion."""
        return interpolated(self.verify_ms, num_nodes) + (batch - 1) * self.verify_sequence_ms

    def draft(self, num_passes: int, width: int, batch: int = 1) -> float:
        """A draft of so many passes over `width` nodes each, the start included; 0 without a draft."""
        if not self.draft_ms:
            return 0.0
        one = interpolated(self.draft_ms, width) + (batch - 1) * self.draft_sequence_ms
        return self.draft_ms[0] + num_passes * one


def interpolated(table: dict[int, float], size: int) -> float:
    """The value at `size`: linear between measured sizes, and beyond the last one along its line."""
    sizes = sorted(table)
    if size in table or len(sizes) == 1:
        return table.get(size, table[sizes[0]])
    above = next((index for index, known in enumerate(sizes) if known > size), len(sizes) - 1)
    low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
    return table[low] + (table[high] - table[low]) * (size - low) / (high - low)


@torch.inference_mode()
def measure_passes(
    executor: EngineExecutor,
    proposer: Proposer | None,
    sizes: Sequence[int],
    widths: Sequence[int],
    context: int,
    patience_s: float = math.inf,
) -> PassTimes:
    """Pass times behind `context` cached tokens. The pool's first pages are overwritten: call it before any request.

    Every pass runs NUM_REPEATS times, or fewer (two at least) once `patience_s` is over.
    """
    pages = -(-(context + max(*sizes, sum(widths)) + 2) // executor.manifest.page_size)
    # A pool may have fewer pages than the widest pass: then some are read twice.
    table = torch.arange(pages, dtype=torch.int32, device=executor.device)[None] % executor.num_pages
    lengths = torch.tensor([context], dtype=torch.int32, device=executor.device)
    passes: dict[tuple[str, int], Callable[[], object]] = {}
    batch = min(BATCH, executor.manifest.max_batch_size)
    # Pages of their own, as far as the pool goes: what one sequence read is not in the caches for the next.
    tables = torch.arange(batch * pages, dtype=torch.int32, device=executor.device).view(batch, pages)
    tables %= executor.num_pages
    for name, size, count in [("verify", size, 1) for size in sizes] + [("verify together", 1, batch)]:
        tree = (expansion_shape([size - 1]) if size > 1 else single_node_shape()).tree(
            torch.full((count, size), 5, device=executor.device)
        )
        inputs = _tree_inputs(tree, lengths.expand(count).contiguous(), tables[:count])
        passes[name, size] = lambda inputs=inputs: executor.target_pass(inputs)
    if proposer is not None:
        state = observe_prompt(executor, proposer, [5] * context, 5, table)
        rows = DraftRows(
            states=state, root_ids=torch.tensor([5], device=executor.device), cache_lengths=lengths, page_table=table
        )
        passes["draft", 0] = lambda: proposer.start(rows).propose(4)
        for width in widths:
            passes["draft", width] = lambda width=width: _start_and_descend(proposer, rows, width)
        together = DraftRows(
            states=rows.states.expand(batch, *rows.states.shape[1:]).contiguous(),
            root_ids=rows.root_ids.expand(batch).contiguous(),
            cache_lengths=lengths.expand(batch).contiguous(),
            page_table=tables,
        )
        passes["draft together", 1] = lambda: _start_and_descend(proposer, together, 1)
    times = _least_ms(passes, executor.device, patience_s)
    drafting = {width: max(ms - times["draft", 0], 0.0) for (kind, width), ms in times.items() if kind == "draft"}
    if proposer is not None:
        drafting[0] = times["draft", 0]
    alone = PassTimes(verify_ms={size: times["verify", size] for size in sizes}, draft_ms=drafting)

    def each(together_ms: float, alone_ms: float) -> float:
        return max(together_ms - alone_ms, 0.0) / max(batch - 1, 1)

    return replace(
        alone,
        verify_sequence_ms=each(times["verify together", 1], alone.verify(batch)),
        draft_sequence_ms=each(times["draft together", 1], alone.draft(1, batch)) if proposer is not None else 0.0,
    )


def _start_and_descend(proposer: Proposer, rows: DraftRows, width: int) -> None:
    draft = proposer.start(rows)
    draft.propose(4)
    zeros = torch.zeros(len(rows.root_ids), width, dtype=torch.int64, device=rows.root_ids.device)
    draft.descend(zeros, zeros + 5)
    draft.propose(4)


def _least_ms(
    passes: dict[tuple[str, int], Callable[[], object]], device: torch.device, patience_s: float
) -> dict[tuple[str, int], float]:
    """The least time of each pass. All take turns, so that whatever else the machine does slows none of them alone."""
    times = dict.fromkeys(passes, math.inf)
    begin = time.monotonic()
    for run in passes.values():
        run()
    for number in range(NUM_REPEATS):
        if number >= 2 and time.monotonic() - begin > patience_s:
            break
        for name, run in passes.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tree_inputs(tree: Tree, lengths: Tensor, table: Tensor) -> PassInputs:
    return PassInputs(
        token_ids=tree.token_ids,
        positions=(lengths[:, None] + tree.depths).int(),
        tree_mask=pack_mask(tree.ancestor_mask),
        cache_lengths=lengths,
        page_table=table,
    )
