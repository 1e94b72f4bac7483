"""What tuning measures: the time of passes over n nodes, and how often each rank of each depth is what the target says.

Text is decoded plainly once; then the drafter is led along it token by token, so that every depth's ranks are seen given that
all before were right. No target pass is needed for that. N nodes, K drafted nodes.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.decoding.drafters.grow import Grower
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposer
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.tree import Tree, pack_mask
from furcate.decoding.tree_shape import TreeShape, expansion_shape, single_node_shape

NUM_REPEATS = 7
BATCH = 8
"""Sequences of the pass that shows what a batch costs beside its nodes."""
NO_RANK = -1
"""Of a token that is none of the ranks looked at."""


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
        state = _observe_prompt(executor, proposer, [5] * context, 5, table)
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


def _observe_prompt(
    executor: EngineExecutor, proposer: Proposer, prompt: Sequence[int], next_id: int, table: Tensor
) -> Tensor:
    """The drafter's state after a prompt; target and drafter cache it in pieces."""
    states = None
    for features, start, tokens in _features(executor, prompt, table):
        following = [*prompt[start + 1 :], next_id][: len(tokens)]
        states = proposer.observe(_committed(executor, (features, tokens, following, start, True), table))
    assert states is not None, "a prompt has at least one token"
    return states


def _features(
    executor: EngineExecutor, tokens: Sequence[int], table: Tensor
) -> Iterator[tuple[Tensor | None, int, list]]:
    """The target's features of a text, piece by piece, with each piece's start and tokens."""
    size = executor.manifest.prefill_chunk_tokens
    for start in range(0, len(tokens), size):
        piece = list(tokens[start : start + size])
        steps = torch.arange(start, start + len(piece), dtype=torch.int32, device=executor.device)
        inputs = PassInputs(
            token_ids=torch.tensor([piece], device=executor.device),
            positions=steps[None],
            tree_mask=None,
            cache_lengths=steps[:1],
            page_table=table,
        )
        last = torch.full((1, 1), len(piece) - 1, device=executor.device)
        yield executor.target_pass(inputs, last).features, start, piece


def _committed(executor: EngineExecutor, piece: tuple, table: Tensor) -> Committed:
    features, tokens, following, start, is_prompt = piece
    return Committed(
        features=features,
        first_ids=torch.tensor(tokens[:1], device=executor.device),
        next_ids=torch.tensor([following], device=executor.device),
        counts=torch.tensor([len(tokens)], device=executor.device),
        cache_lengths=torch.tensor([start], dtype=torch.int32, device=executor.device),
        page_table=table,
        is_prompt=is_prompt,
    )


@dataclass(kw_only=True)
class Ranks:
    """What rank the drafter gave to each token that the target wrote.

    texts[t][i][d]: at place i of text t, the rank of the token d + 1 places on, drafted behind the tokens before it; a row ends
    early with NO_RANK, where the token was not among the ranks looked at, or with the text.
    """

    max_depth: int
    num_ranks: int
    texts: list[list[list[int]]] = field(default_factory=list)

    def rates(self) -> list[list[float]]:
        """rates[d][r]: the chance of rank r at depth d + 1, given that the path above was right; every place counts alike."""
        tries = [0] * self.max_depth
        hits = [[0] * self.num_ranks for _ in range(self.max_depth)]
        for row in (row for text in self.texts for row in text):
            for depth, rank in enumerate(row):
                tries[depth] += 1
                if rank != NO_RANK:
                    hits[depth][rank] += 1
        return [[hit / max(tried, 1) for hit in row] for row, tried in zip(hits, tries, strict=True)]

    def tau_of(self, shape: TreeShape) -> float:
        """Tokens a step of this shape, had it decoded these texts: each step begins where the one before ended.

        So steps stand more often where the text is hard to guess than the average place does, which the product of rates does
        not know. Steps that the end of a text may have cut short are left out, but for the only step of a text.
        """
        paths, steps, tokens = set(shape.paths), 0, 0
        for text in self.texts:
            place = 0
            while place == 0 or place + max(shape.max_depth, 1) <= len(text):
                ranks = tuple(text[place])
                accepted = next(depth for depth in reversed(range(len(ranks) + 1)) if ranks[:depth] in paths)
                steps, tokens, place = steps + 1, tokens + accepted + 1, place + accepted + 1
        return tokens / steps if steps else 1.0


class Follower:
    """Leads a drafter along texts that the target wrote, gathering ranks and what whole trees would have accepted."""

    def __init__(self, executor: EngineExecutor, proposer: Proposer, max_depth: int, num_ranks: int) -> None:
        self.executor, self.proposer = executor, proposer
        self.ranks = Ranks(max_depth=max_depth, num_ranks=num_ranks)
        self.accepted: dict[str, list[int]] = {}
        """By tree, the accepted drafts of each of its steps; each step begins where the one before ended."""

    @torch.inference_mode()
    def follow(
        self, prompt: Sequence[int], text: Sequence[int], growers: dict[str, Grower], sampling: SamplingRows
    ) -> None:
        """Walks along `text` (two tokens at least) behind `prompt`, growing each tree where its last one ended."""
        executor = self.executor
        tokens = [*prompt, *text]
        pages = -(-(len(tokens) + 2 * 128) // executor.manifest.page_size)
        table = torch.arange(pages, dtype=torch.int32, device=executor.device)[None]
        pieces = [features for features, _, _ in _features(executor, tokens, table)]
        features = torch.cat([piece for piece in pieces if piece is not None], 1) if pieces[0] is not None else None
        state = _observe_prompt(executor, self.proposer, prompt, text[0], table)
        next_place = dict.fromkeys(growers, len(prompt))
        self.ranks.texts.append([])
        for place in range(len(prompt), len(tokens) - 1):
            rows = DraftRows(
                states=state,
                root_ids=torch.tensor([tokens[place]], device=executor.device),
                cache_lengths=torch.tensor([place], dtype=torch.int32, device=executor.device),
                page_table=table,
            )
            truth = tokens[place + 1 :]
            for name, grower in growers.items():
                if place == next_place[name]:
                    tree = grower.grow(self.proposer, rows, sampling)
                    accepted = accepted_drafts(tree, truth)
                    next_place[name] += accepted + 1
                    if place == len(prompt) or int(tree.depths[0].max()) <= len(truth):
                        self.accepted.setdefault(name, []).append(accepted)
            self.ranks.texts[-1].append(self._ranks_of(rows, truth))
            own = features[:, place : place + 1] if features is not None else None
            piece = (own, tokens[place : place + 1], tokens[place + 1 : place + 2], place, False)
            state = self.proposer.observe(_committed(executor, piece, table))

    def _ranks_of(self, rows: DraftRows, truth: Sequence[int]) -> list[int]:
        draft, ranks = self.proposer.start(rows), []
        truth = truth[: self.ranks.max_depth]
        for depth, token in enumerate(truth):
            proposed = draft.propose(self.ranks.num_ranks).token_ids[0, 0].tolist()
            if token not in proposed:
                return [*ranks, NO_RANK]
            ranks.append(proposed.index(token))
            if depth + 1 < len(truth):
                draft.descend(torch.zeros_like(rows.root_ids)[:, None], torch.full_like(rows.root_ids, token)[:, None])
        return ranks


def accepted_drafts(tree: Tree, truth: Sequence[int]) -> int:
    """How many of the tokens to come the tree's first row has on one path."""
    tokens, parents, count = tree.token_ids[0].tolist(), tree.parents[0].tolist(), int(tree.num_nodes[0])
    node, depth = 0, 0
    for token in truth:
        below = [child for child in range(1, count) if parents[child] == node and tokens[child] == token]
        if not below:
            break
        node, depth = below[0], depth + 1
    return depth
