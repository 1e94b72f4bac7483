"""Runs many requests on one engine: admission, prompt chunks, steps, endings. Host code between steps.

A request's life: `add` checks it and puts it in line; `step` admits it when the pool can promise it all the pages it may ever
need, runs its prompt in chunks, then one speculative step at a time; its last output carries the finish reason, and by then
its pages are free.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.errors import RequestError
from furcate.builder.tree_config import TreeConfig
from furcate.decoding.adaptive import Ladder
from furcate.decoding.cache import PagePool
from furcate.decoding.drafters.proposer import DraftRows
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.limits import check_request
from furcate.decoding.logits.guide import GuideCompiler
from furcate.decoding.logits.processing import TextLogits, processing_of, text_logits_of
from furcate.decoding.request import Request, StepOutput
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.sequence import NewTokens, Sequence
from furcate.decoding.step import PromptChunk, Step, StepResult, StepRows
from furcate.decoding.threads import settle_threads


class Scheduler:
    """The requests of one engine. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        executor: TorchExecutor,
        tree: TreeConfig | None = None,
        acceptance: Acceptance | None = None,
        *,
        is_adaptive: bool | None = None,
    ) -> None:
        """Tree, rule and adaptivity are the engine's own unless said otherwise; another tree is not adaptive unless said so."""
        self.executor = executor
        self.manifest = executor.manifest
        self._step = Step(executor, tree or self.manifest.tree, acceptance or self.manifest.acceptance)
        is_adaptive = (tree is None and self.manifest.is_adaptive) if is_adaptive is None else is_adaptive
        self._ladder = Ladder(executor, self._step, tree or self.manifest.tree) if is_adaptive else None
        self.pool = PagePool(executor.num_pages, self.manifest.page_size)
        self.sequences: dict[int, Sequence] = {}
        self._guides = GuideCompiler(
            executor.tokenizer_dir, self.manifest.eos_token_ids, self.manifest.target.vocab_size
        )

    @classmethod
    def from_engine(cls, engine_dir: Path, *, num_threads: int | None = None) -> "Scheduler":
        """A scheduler of the engine at `engine_dir`, on as many CPU threads as serve it best (see threads.py).

        Raises EngineMismatch when it cannot be run here.
        """
        executor = TorchExecutor(read_engine(engine_dir))
        settle_threads(executor, num_threads)
        return cls(executor)

    @property
    def num_pages(self) -> int:
        """Pages of the K/V pool."""
        return self.pool.num_pages

    @property
    def num_allocated_pages(self) -> int:
        """Pages that belong to live requests."""
        return self.pool.num_allocated

    @property
    def num_committed_pages(self) -> int:
        """Pages that committed tokens fill; equal to the allocated ones between steps."""
        return sum(self.pool.pages_for(sequence.cache_length) for sequence in self.sequences.values())

    def add(self, request: Request) -> None:
        """Puts a request in line. Raises RequestError, leaving everything as it was, when it cannot be served."""
        check_request(request, self.manifest)
        acceptance = self._step.acceptance
        if acceptance is Acceptance.GREEDY and request.sampling.temperature > 0:
            raise RequestError(
                f"temperature is {request.sampling.temperature}, and this engine accepts greedily; send 0, or build with "
                "--acceptance match."
            )
        if request.request_id in self.sequences:
            raise RequestError(f"request id {request.request_id} is already in use by a live request; use another.")
        if self._pages_needed(request) > self.num_pages:
            raise RequestError(
                f"the request needs {self._pages_needed(request)} K/V pages and the pool has {self.num_pages}; "
                "shorten it, or build with a larger --max-pool-tokens."
            )
        sequence = Sequence(request)
        sequence.stats = replace(sequence.stats, is_lossless=acceptance.is_lossless)
        sequence.logits = self._text_logits(request)
        self.sequences[request.request_id] = sequence

    def cancel(self, request_id: int) -> None:
        """Ends a request; its pages are free when this returns. Unknown ids are ignored."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self._release(sequence)
            if self._ladder is not None:
                self._ladder.forget(request_id)

    def step(self, request_ids: Iterable[int] | None = None) -> list[StepOutput]:
        """One step of these live requests (all by default), one output each, in their order.

        An output without tokens: the request waits for room, is in its prompt, or its tokens may begin a stop sequence.
        """
        ids = list(self.sequences) if request_ids is None else list(request_ids)
        chosen = [self.sequences[request_id] for request_id in ids]
        self._admit()
        outputs: dict[int, StepOutput] = {}
        running = [sequence for sequence in chosen if sequence.is_prefilled]
        size = self.manifest.max_batch_size
        for start in range(0, len(running), size):
            outputs |= self._decode(running[start : start + size])
        outputs |= self._prefill([sequence for sequence in chosen if not sequence.is_prefilled])
        for sequence in chosen:
            if outputs[sequence.request.request_id].finish_reason is not None:
                self.cancel(sequence.request.request_id)
        return [outputs[request_id] for request_id in ids]

    def _admit(self) -> None:
        """Reserves pages for waiting requests, first come first served; one that does not fit holds back those behind it."""
        for sequence in self.sequences.values():
            if sequence.num_reserved_pages is None:
                num_pages = self._pages_needed(sequence.request)
                if not self.pool.reserve(num_pages):
                    return
                sequence.num_reserved_pages = num_pages
                sequence.stats = replace(sequence.stats, first_scheduled_time_ns=time.time_ns())

    def _pages_needed(self, request: Request) -> int:
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens + self._step.num_slots
        return self.pool.pages_for(num_tokens)

    def _prefill(self, sequences: list[Sequence]) -> dict[int, StepOutput]:
        """Runs prompt chunks within the step's token budget; who gets none waits for the next step."""
        outputs = {}
        budget = 2 * self.manifest.prefill_chunk_tokens
        for sequence in sequences:
            output = sequence.waiting()
            remaining = len(sequence.request.prompt_ids) - sequence.cache_length
            length = min(remaining, self.manifest.prefill_chunk_tokens)
            if sequence.num_reserved_pages is not None and length <= budget:
                budget -= length
                output = self._prefill_chunk(sequence, length)
            outputs[sequence.request.request_id] = output
        return outputs

    def _prefill_chunk(self, sequence: Sequence, length: int) -> StepOutput:
        start, prompt = sequence.cache_length, sequence.request.prompt_ids
        end = start + length
        self._resize(sequence, end)
        chunk = PromptChunk(
            token_ids=torch.tensor([prompt[start:end]], device=self.executor.device),
            cache_lengths=self._int32([start]),
            page_table=self._int32([sequence.pages]),
            next_id=prompt[end] if end < len(prompt) else None,
        )
        first = self._step.prefill(chunk, self._sampling_rows([sequence]))
        sequence.cache_length = end
        if first is None:
            return sequence.waiting()
        sequence.root_id, sequence.state = first.token_id, first.state
        log_probs = [first.log_prob] if first.log_prob is not None else []
        return sequence.output(NewTokens(token_ids=[first.token_id], logits=[first.chosen_logit], log_probs=log_probs))

    def _decode(self, sequences: list[Sequence]) -> dict[int, StepOutput]:
        for sequence in sequences:
            self._resize(sequence, sequence.cache_length + self._step.num_slots)
        step = self._step if self._ladder is None else self._ladder.step_for(sequences)
        result = step.run(StepRows(draft=self._draft_rows(sequences), sampling=self._sampling_rows(sequences)))
        if self._ladder is not None:
            self._ladder.learn(step, sequences, result)
        outputs = {}
        num_nodes = result.num_nodes.tolist()
        for row, (sequence, new) in enumerate(zip(sequences, _new_tokens(result), strict=True)):
            sequence.cache_length += len(new.token_ids)
            sequence.root_id, sequence.state = new.token_ids[-1], result.states[row]
            self._resize(sequence, sequence.cache_length)
            outputs[sequence.request.request_id] = sequence.output(new, num_nodes[row] - 1)
        return outputs

    def _resize(self, sequence: Sequence, num_tokens: int) -> None:
        self.pool.resize(sequence.pages, self.pool.pages_for(num_tokens))
        pages = max(len(sequence.pages), sequence.stats.num_allocated_pages)
        if pages != sequence.stats.num_allocated_pages:
            sequence.stats = replace(sequence.stats, num_allocated_pages=pages)

    def _release(self, sequence: Sequence) -> None:
        self.pool.resize(sequence.pages, 0)
        if sequence.num_reserved_pages is not None:
            self.pool.unreserve(sequence.num_reserved_pages)
            sequence.num_reserved_pages = None

    def _draft_rows(self, sequences: list[Sequence]) -> DraftRows:
        longest = max(len(sequence.pages) for sequence in sequences)
        states = [sequence.state for sequence in sequences if sequence.state is not None]
        return DraftRows(
            # Without a proposer, sequences that have just joined have no state and older ones an empty one.
            states=torch.stack(states)
            if len(states) == len(sequences)
            else torch.empty(len(sequences), 0, device=self.executor.device),
            root_ids=torch.tensor([sequence.root_id for sequence in sequences], device=self.executor.device),
            cache_lengths=self._int32([sequence.cache_length for sequence in sequences]),
            page_table=self._int32([sequence.pages + [0] * (longest - len(sequence.pages)) for sequence in sequences]),
        )

    def _sampling_rows(self, sequences: list[Sequence]) -> SamplingRows:
        params = [sequence.sampling for sequence in sequences]
        vocab_size = self.manifest.target.vocab_size
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        limited = [k for k in top_k if k < vocab_size]
        top_p = [1.0 if p.top_p is None else p.top_p for p in params]
        min_p = [p.min_p or 0.0 for p in params]
        device = self.executor.device
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

    def _text_logits(self, request: Request) -> TextLogits | None:
        sampling = request.sampling
        guide = self._guides.compile(sampling.guide, sampling.end_ids) if sampling.guide is not None else None
        return text_logits_of(request, self.manifest.target.vocab_size, self.executor.device, guide)

    def _int32(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.executor.device)


def _new_tokens(result: StepResult) -> list[NewTokens]:
    """Each row's tokens of a step, on the host."""
    counts = result.num_tokens.tolist()
    token_ids, logits = result.token_ids.tolist(), result.chosen_logits.tolist()
    log_probs = result.log_probs.tolist() if result.log_probs is not None else [[]] * len(counts)
    return [
        NewTokens(token_ids=ids[:count], logits=values[:count], log_probs=row_log_probs[:count])
        for count, ids, values, row_log_probs in zip(counts, token_ids, logits, log_probs, strict=True)
    ]


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number, which is what torch's int64 holds."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
