"""Steps as captured programs: draft passes, verification, acceptance and commit replayed as one CUDA graph.

A step owns one kind of tree, its node bucket; here is one graph for each batch bucket and each manner of choosing tokens that
has occurred. Its inputs are buffers that every step's rows are copied into. Executors differ in nothing but their passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.executors.graphs import Capture, cuda_capture
from furcate.decoding.padded_rows import first_rows, padded_rows, row_tensors, scratch_table

if TYPE_CHECKING:
    from furcate.decoding.step import StepResult, StepRows

LOG = logging.getLogger("furcate.graphs")
MAX_GRAPHS = 64
"""Graphs of one kind of tree; batches of further kinds run uncaptured."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What decides which kernels a step runs, and on what shapes."""

    batch: int
    is_greedy: bool
    largest_top_k: int | None
    uses_top_p: bool
    has_min_p: bool
    returns_log_probs: bool


@dataclass(frozen=True)
class CapturedStep:
    """A captured step: its input buffers, how to run it, and the result it writes."""

    inputs: StepRows
    replay: Callable[[], None]
    result: StepResult


class StepGraphs:
    """The captured programs of one step function. `buckets` are the batch sizes that programs are made for, ascending."""

    def __init__(
        self,
        executor: EngineExecutor,
        run: Callable[[StepRows], StepResult],
        buckets: tuple[int, ...],
        num_slots: int,
        capture: Capture = cuda_capture,
    ) -> None:
        manifest = executor.manifest
        self.executor = executor
        self.buckets = buckets
        self.num_pages = -(-(manifest.max_context_tokens + num_slots) // manifest.page_size)
        self.captured: dict[Variant, CapturedStep] = {}
        self._run = run
        self._capture = capture
        self._is_usable = True

    def run(self, rows: StepRows) -> StepResult | None:
        """The step of these rows, or None where it has to be run uncaptured: penalties and guides differ from text to text."""
        batch = len(rows.draft.root_ids)
        if not self._is_usable or rows.sampling.processing is not None or batch > self.buckets[-1]:
            return None
        rows = self.canonical(rows)
        variant = self.variant_of(rows, next(bucket for bucket in self.buckets if batch <= bucket))
        if variant not in self.captured and len(self.captured) == MAX_GRAPHS:
            return None
        rows = padded_rows(rows, variant.batch, self.num_pages, self.executor.num_pages)
        if variant not in self.captured and not self._add(variant, rows):
            return None
        step = self.captured[variant]
        for buffer, value in zip(row_tensors(step.inputs), row_tensors(rows), strict=True):
            buffer.copy_(value)
        step.replay()
        return first_rows(step.result, batch)

    def canonical(self, rows: StepRows) -> StepRows:
        """The same law with fewer variants: top-k looks at a power of two of tokens, and greedy batches ask for nothing."""
        sampling = rows.sampling
        if sampling.is_greedy:
            sampling = replace(sampling, largest_top_k=None, uses_top_p=False, min_p=None)
        elif sampling.largest_top_k is not None:
            most = self.executor.manifest.target.vocab_size
            sampling = replace(sampling, largest_top_k=min(1 << (sampling.largest_top_k - 1).bit_length(), most))
        return replace(rows, sampling=sampling)

    def variant_of(self, rows: StepRows, bucket: int) -> Variant:
        """The program that these rows need."""
        sampling = rows.sampling
        return Variant(
            batch=bucket,
            is_greedy=sampling.is_greedy,
            largest_top_k=sampling.largest_top_k,
            uses_top_p=sampling.uses_top_p,
            has_min_p=sampling.min_p is not None,
            returns_log_probs=sampling.returns_log_probs,
        )

    def _add(self, variant: Variant, rows: StepRows) -> bool:
        """Captures a program; False where CUDA refuses it, and then no further one is tried."""
        scratch = scratch_table(rows, self.executor.num_pages)
        warm_up = replace(rows, draft=replace(rows.draft, page_table=scratch))
        try:
            with self.executor.capturing():
                replay, result = self._capture(lambda: self._run(rows), lambda: self._run(warm_up))
        except RuntimeError as error:
            self._is_usable = False
            LOG.warning("steps run uncaptured, because CUDA refused the graph: %s", str(error).splitlines()[0])
            return False
        self.captured[variant] = CapturedStep(rows, replay, result)
        return True
