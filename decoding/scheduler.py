"""Runs many requests on one engine: admission, prompt chunks, steps, endings. Host code between steps.

A request's life: `add` checks it and puts it in line; it gets room when the pool can promise it the pages it needs; its prompt
runs in chunks, from where kept pages of earlier texts end; then one speculative step at a time; its last output carries the
finish reason, and by then its pages are free, or kept for those to come. One that is put back in line (only where pages are
promised optimistically) keeps its drafter's state, computes its K/V again, and goes on as if nothing had been.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from furcate.builder.acceptance_config import Acceptance, can_adapt
from furcate.builder.engine import read_engine
from furcate.builder.errors import RequestError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig
from furcate.builder.tree_config import TreeConfig
from furcate.decoding.adaptive import Ladder
from furcate.decoding.batch import draft_rows, first_tokens, new_tokens, prompt_chunk, sampling_rows
from furcate.decoding.cache import PagePool
from furcate.decoding.counts import SchedulerCounts, Totals, counts_of, num_committed_pages
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.executors.load import load_executor
from furcate.decoding.lasting_rows import num_lasting_rows, pages_of
from furcate.decoding.limits import check_acceptance, check_pages, check_request
from furcate.decoding.line import Line
from furcate.decoding.logits.guide import GuideCompiler
from furcate.decoding.logits.processing import TextLogits, text_logits_of
from furcate.decoding.request import Request, StepOutput
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.sequence import Sequence
from furcate.decoding.step import Step, StepRows
from furcate.decoding.threads import settle_threads

ALONE = SchedulingConfig(prefix_reuse=False)
"""For a scheduler that may share its executor's cache: what one keeps, another would overwrite."""


class Scheduler:
    """The requests of one engine. Not thread-safe: one caller at a time."""

    step_type = Step

    def __init__(
        self,
        executor: EngineExecutor,
        tree: TreeConfig | None = None,
        acceptance: Acceptance | None = None,
        *,
        is_adaptive: bool | None = None,
        scheduling: SchedulingConfig = ALONE,
    ) -> None:
        """Tree, rule and adaptivity are the engine's own unless said otherwise; another tree is not adaptive unless said so."""
        self.executor = executor
        self.manifest = executor.manifest
        self.scheduling = scheduling
        self._step = self.step_type(executor, tree or self.manifest.tree, acceptance or self.manifest.acceptance)
        if is_adaptive is None:
            is_own = tree is None and can_adapt(len(self.manifest.heads), self.manifest.tree, self._step.acceptance)
            is_adaptive = is_own and self.manifest.is_adaptive
        self._ladder = Ladder(executor, self._step, tree or self.manifest.tree) if is_adaptive else None
        self.pool = PagePool(executor.num_pages, self.manifest.page_size)
        self._pages = pages_of(self._step, self.pool, is_reusing=scheduling.prefix_reuse)
        self._line = Line(scheduling)
        self._totals = Totals()
        self._num_added = 0
        self._num_turns = 0
        self.sequences: dict[int, Sequence] = {}
        self._guides = GuideCompiler(
            executor.tokenizer_dir, self.manifest.eos_token_ids, self.manifest.target.vocab_size
        )

    @classmethod
    def from_engine(
        cls, engine_dir: Path, *, num_threads: int | None = None, scheduling: SchedulingConfig | None = None
    ) -> "Scheduler":
        """A scheduler of the engine at `engine_dir`, on as many CPU threads as serve it best (see threads.py).

        Raises EngineMismatch when it cannot be run here.
        """
        executor = load_executor(read_engine(engine_dir))
        settle_threads(executor, num_threads)
        return cls(executor, scheduling=scheduling or SchedulingConfig())

    @property
    def num_pages(self) -> int:
        """Pages of the K/V pool."""
        return self.pool.num_pages

    @property
    def num_allocated_pages(self) -> int:
        """Pages that live requests hold, a shared one counted once. Pages that are only kept for later are not among them."""
        return self._pages.num_allocated

    @property
    def num_committed_pages(self) -> int:
        """Pages that live requests' committed tokens fill; equal to the allocated ones between steps."""
        return num_committed_pages(self.sequences.values(), self._pages)

    @property
    def counts(self) -> SchedulerCounts:
        """Where the requests stand, and what has been done so far."""
        return counts_of(self.sequences.values(), self._pages, self._totals)

    def add(self, request: Request) -> None:
        """Puts a request in line. Raises RequestError, leaving everything as it was, when it cannot be served."""
        try:
            check_request(request, self.manifest)
            check_acceptance(request, self._step.acceptance)
            check_pages(self.pool.pages_for(self._most_tokens(request)), self.num_pages)
            if request.request_id in self.sequences:
                raise RequestError(f"request id {request.request_id} is already in use by a live request; use another.")
            sequence = Sequence(request, self._num_added)
            sequence.stats = replace(sequence.stats, is_lossless=self._step.acceptance.is_lossless)
            sequence.logits = self._text_logits(request)
            self._line.join(sequence)
            self._admit()
            if sequence.is_waiting:
                self._line.refuse_if_too_long(sequence)
        except RequestError:
            self._totals.num_refused += 1
            raise
        self._num_added += 1
        self.sequences[request.request_id] = sequence

    def cancel(self, request_id: int) -> None:
        """Ends a request; its pages are free when this returns. Unknown ids are ignored."""
        if request_id in self.sequences:
            self._totals.num_cancelled += 1
            self._end(self.sequences[request_id])

    def step(self, request_ids: Iterable[int] | None = None) -> list[StepOutput]:
        """One step of these live requests (all by default), one output each, in their order.

        An output without tokens: the request waits for room, is in its prompt, or its tokens may begin a stop sequence.
        """
        ids = list(self.sequences) if request_ids is None else list(request_ids)
        chosen = [self.sequences[request_id] for request_id in ids]
        outputs = self._end_overdue(chosen)
        self._admit()
        try:
            outputs |= self._run([sequence for sequence in chosen if sequence.request.request_id not in outputs])
        except BaseException:
            for sequence in chosen:
                sequence.is_intact = False
            raise
        for output in outputs.values():
            if output.finish_reason is not None and output.request_id in self.sequences:
                self._totals.count_end(output)
                self._end(self.sequences[output.request_id], is_kept=output.error is None)
        return [outputs[request_id] for request_id in ids]

    def forget_prefixes(self) -> None:
        """Frees all pages that are only kept for requests to come."""
        self._pages.forget()

    def _admit(self) -> None:
        for sequence in self._line.admit(self._give_room):
            sequence.start()
            self._end_turn(sequence)

    def _end_turn(self, sequence: Sequence) -> None:
        """Puts it behind all others that have a prompt to run."""
        self._num_turns += 1
        sequence.turn = self._num_turns

    def _give_room(self, sequence: Sequence) -> bool:
        is_full = self.scheduling.reservation is Reservation.FULL
        num_tokens = self._most_tokens(sequence.request) if is_full else len(sequence.token_ids) + self._step.num_slots
        return self._pages.promise(sequence, num_tokens)

    def _most_tokens(self, request: Request) -> int:
        return len(request.prompt_ids) + request.sampling.max_tokens + self._step.num_slots

    def _end_overdue(self, sequences: list[Sequence]) -> dict[int, StepOutput]:
        """Ends requests whose time is over; their last outputs."""
        outputs = {}
        for sequence in sequences:
            sentence = self._line.overdue(sequence)
            if sentence is not None:
                output = outputs[sequence.request.request_id] = sequence.cancelled(sentence)
                self._totals.num_overdue += 1
                self._totals.count_end(output)
                self._end(sequence)
        return outputs

    def _run(self, chosen: list[Sequence]) -> dict[int, StepOutput]:
        """Decodes those past their prompt, and takes the others' prompts on."""
        outputs = {}
        running = [sequence for sequence in chosen if sequence.is_prefilled]
        filling = [sequence for sequence in chosen if not sequence.is_prefilled]
        size = self.manifest.max_batch_size
        for start in range(0, len(running), size):
            outputs |= self._decode(self._with_room(running[start : start + size]))
        self._prefill(filling, outputs)
        for sequence in chosen:
            outputs.setdefault(sequence.request.request_id, sequence.waiting())
        return outputs

    def _with_room(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that have the pages for a step; where the pool is short, the last in rank are put back in line."""
        ready = []
        for sequence in sorted(sequences, key=lambda sequence: sequence.rank):
            while sequence.is_prefilled:
                if self._pages.promise(sequence, sequence.cache_length + self._step.num_slots):
                    ready.append(sequence)
                    break
                live = [other for other in self.sequences.values() if not other.is_waiting]
                self._preempt(max(live, key=lambda other: other.rank))
        return ready

    def _preempt(self, sequence: Sequence) -> None:
        self._totals.num_preempted += 1
        self._pages.release(sequence, self._num_settled_rows(sequence))
        sequence.cache_length = 0
        self._line.join(sequence)

    def _prefill(self, sequences: list[Sequence], outputs: dict[int, StepOutput]) -> None:
        """Runs prompt chunks within the step's token budget, in turn; who gets none is the first of the next step."""
        chunk = self.manifest.prefill_chunk_tokens
        budget = left = self.scheduling.prefill_tokens_per_step or 2 * chunk
        for sequence in sorted(sequences, key=lambda sequence: (-sequence.request.priority, sequence.turn)):
            if left == 0:
                return
            if sequence.is_waiting:
                continue
            self._reuse(sequence)
            length = min(sequence.num_rows_to_fill - sequence.cache_length, chunk, budget)
            if 0 < length <= left:
                left -= length
                outputs[sequence.request.request_id] = self._prefill_chunk(sequence, length)
                self._end_turn(sequence)

    def _reuse(self, sequence: Sequence) -> None:
        """Takes over kept rows, so many that the drafter's state is still computed (or, put back in line, kept) as it must be."""
        num_rows = min(sequence.num_rows_to_fill, num_lasting_rows(sequence, self._step, self._ladder))
        if sequence.root_id is None:
            num_rows -= 1
        before = sequence.stats.num_reused_tokens
        self._pages.reuse(sequence, num_rows)
        self._totals.num_reused_tokens += sequence.stats.num_reused_tokens - before

    def _prefill_chunk(self, sequence: Sequence, length: int) -> StepOutput:
        self._pages.resize(sequence, sequence.cache_length + length)
        chunk = prompt_chunk(sequence, length, self.executor.device)
        first = self._step.prefill(chunk, self._sampling_rows([sequence]))
        self._totals.num_prefill_tokens += length
        sequence.cache_length += length
        if first is None:
            output = sequence.waiting()
        else:
            sequence.root_id, sequence.state = first.token_id, first.state
            output = sequence.output(first_tokens(first))
        if output.error is None:
            self._pages.keep(sequence, self._num_settled_rows(sequence))
        return output

    def _decode(self, sequences: list[Sequence]) -> dict[int, StepOutput]:
        if not sequences:
            return {}
        for sequence in sequences:
            self._pages.resize(sequence, sequence.cache_length + self._step.num_slots)
        groups = [(self._step, sequences)] if self._ladder is None else self._ladder.steps_for(sequences)
        outputs = {}
        for step, group in groups:
            outputs |= self._decode_with(step, group)
        return outputs

    def _decode_with(self, step: Step, sequences: list[Sequence]) -> dict[int, StepOutput]:
        result = step.run(self._step_rows(sequences))
        if self._ladder is not None:
            self._ladder.learn(step, sequences, result)
        outputs = {}
        num_nodes = result.num_nodes.tolist()
        for row, (sequence, new) in enumerate(zip(sequences, new_tokens(result), strict=True)):
            sequence.cache_length += len(new.token_ids)
            self._totals.num_decode_tokens += len(new.token_ids)
            sequence.root_id, sequence.state = new.token_ids[-1], result.states[row]
            if not step.commits_late:
                self._pages.resize(sequence, sequence.cache_length)
            outputs[sequence.request.request_id] = sequence.output(new, num_nodes[row] - 1)
        return outputs

    def _num_settled_rows(self, sequence: Sequence) -> int:
        """Cached rows, of the target and its drafter, that no pass writes again."""
        return min(sequence.cache_length, num_lasting_rows(sequence, self._step, self._ladder))

    def _end(self, sequence: Sequence, *, is_kept: bool = True) -> None:
        """Takes a request's pages back, for good or to be reused."""
        request_id = sequence.request.request_id
        self._pages.release(sequence, self._num_settled_rows(sequence) if is_kept and sequence.is_intact else 0)
        self._line.leave(sequence)
        del self.sequences[request_id]
        if self._ladder is not None:
            self._ladder.forget(request_id)

    def _step_rows(self, sequences: list[Sequence]) -> StepRows:
        return StepRows(draft=draft_rows(sequences, self.executor.device), sampling=self._sampling_rows(sequences))

    def _sampling_rows(self, sequences: list[Sequence]) -> SamplingRows:
        return sampling_rows(sequences, self.manifest.target.vocab_size, self.executor.device)

    def _text_logits(self, request: Request) -> TextLogits | None:
        sampling = request.sampling
        guide = self._guides.compile(sampling.guide, sampling.end_ids) if sampling.guide is not None else None
        return text_logits_of(request, self.manifest.target.vocab_size, self.executor.device, guide)
