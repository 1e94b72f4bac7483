"""Trees that follow their luck: for each sequence a step drafts the whole tree, a small one or nothing, whatever should yield most.

What a tree yields is learned per sequence from what was accepted lately; what it costs comes from the engine's own pass times,
and grows with the batch (tree_budget.py). Text that the drafter cannot predict is soon decoded plainly, with a small tree tried
now and then. Features of plainly decoded tokens are kept, so that the drafter catches up in one pass when it is tried again.

Only for sample-and-match (and greedy), whose text does not depend on the trees.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.errors import ConfigError
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposer
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.pass_times import PassTimes, interpolated, measure_passes
from furcate.decoding.sequence import Sequence
from furcate.decoding.step import Step, StepResult
from furcate.decoding.tree_budget import Luck, best_rungs, rungs_of, smaller_tree, step_table

MEASURED_SIZES = (1, 4, 8, 16, 32, 128)
"""Nodes of the passes that are timed; a batch of 32 small trees has about as many as the last."""
MEASURED_WIDTHS = (1, 4, 32)
"""Nodes of the draft passes that are timed."""
MEASURED_CONTEXT = 64
"""Tokens in the cache before the passes that are timed."""
PATIENCE_S = 1.0
"""Of timing passes while an engine is loaded."""


@dataclass(kw_only=True)
class Unseen:
    """The tokens of one sequence that its drafter has not seen."""

    start: int
    """Cache length when the drafter last saw the text."""
    token_ids: list[int]
    """The root of that time, and every token since."""
    features: list[Tensor | None] = field(default_factory=list)


class Ladder:
    """Plain decoding, a small tree and the whole one, over one executor and one drafter.

    Built before any request is served: pass times that the manifest does not have are measured on the pool's first pages.
    """

    def __init__(self, executor: EngineExecutor, whole: Step, tree: TreeConfig) -> None:
        if whole.acceptance not in (Acceptance.MATCH, Acceptance.GREEDY):
            raise ConfigError(
                f"an adaptive budget needs acceptance match, and this is {whole.acceptance}: its text would depend on the budget."
            )
        if tree.kind is TreeKind.MERGED:
            raise ConfigError("an adaptive budget is for one head, and this engine merges the trees of several.")
        if whole.proposer is None:
            raise ConfigError("an adaptive budget needs a head and a tree; this engine decodes plainly.")
        plain = Step(executor, TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single"))
        small = Step(executor, smaller_tree(tree))
        # A draft model's states have the width of the whole tree's.
        small.proposer = whole.proposer
        self.executor, self.proposer = executor, whole.proposer
        self.steps = (plain, small, whole)
        self.rungs = rungs_of(tree)
        self.reckon_with(_recorded_times(executor) or _measured_times(executor, whole.proposer, tree))
        self.lucks: dict[int, Luck] = {}
        """By request, what is known of it."""
        self.unseen: dict[int, Unseen] = {}
        """By request, of those whose drafter is behind."""

    def reckon_with(self, times: PassTimes) -> None:
        """Chooses by these pass times from now on."""
        self.times = times
        self._step_ms = step_table(self.rungs, times, self.executor.manifest.max_batch_size)

    def steps_for(self, sequences: list[Sequence]) -> list[tuple[Step, list[Sequence]]]:
        """The steps to run now, each with its sequences; the drafter has then seen all of their text if it needs to."""
        lucks = [self.lucks.setdefault(sequence.request.request_id, Luck()) for sequence in sequences]
        chosen = best_rungs(self.rungs, self._step_ms, [luck.hoped_gain for luck in lucks])
        groups = []
        for rung, step in enumerate(self.steps):
            group = [sequence for sequence, own in zip(sequences, chosen, strict=True) if own == rung]
            if group:
                groups.append((step, group))
        for step, group in groups:
            for sequence in group if step is not self.steps[0] else ():
                self._catch_up(sequence)
        return groups

    def learn(self, step: Step, sequences: list[Sequence], result: StepResult) -> None:
        """Takes in what a step gave; called while the sequences still stand where they stood before it."""
        counts, token_ids = result.num_tokens.tolist(), result.token_ids.tolist()
        rung, batch = self.steps.index(step), len(sequences)
        for row, sequence in enumerate(sequences):
            request_id = sequence.request.request_id
            luck = self.lucks[request_id]
            if rung > 0:
                catching_up = interpolated(self.times.draft_ms, luck.num_plain) if luck.num_plain else 0.0
                cost = self._step_ms[rung][batch] / self._step_ms[0][batch] + catching_up / self._step_ms[0][1]
                luck.learn(counts[row] - 1, self.rungs[rung].share, cost)
                continue
            luck.learn_plain()
            if request_id not in self.unseen:
                self.unseen[request_id] = Unseen(start=sequence.cache_length, token_ids=[_root(sequence)])
            unseen = self.unseen[request_id]
            unseen.token_ids += token_ids[row][: counts[row]]
            unseen.features.append(result.features[row : row + 1] if result.features is not None else None)

    def forget(self, request_id: int) -> None:
        """Drops what is known of a request that has ended."""
        self.lucks.pop(request_id, None)
        self.unseen.pop(request_id, None)

    @torch.inference_mode()
    def _catch_up(self, sequence: Sequence) -> None:
        unseen = self.unseen.pop(sequence.request.request_id, None)
        if unseen is None:
            return
        device = self.executor.device
        lengths = torch.tensor([unseen.start], dtype=torch.int32, device=device)
        table = torch.tensor([sequence.pages], dtype=torch.int32, device=device)
        first_ids = torch.tensor(unseen.token_ids[:1], device=device)
        if self.proposer.num_held_slots > 0 and sequence.state is not None:
            # A draft model reads what it was last told of when it starts a draft: it must, before it can go on from there.
            self.proposer.start(
                DraftRows(states=sequence.state[None], root_ids=first_ids, cache_lengths=lengths, page_table=table)
            )
        features = [piece for piece in unseen.features if piece is not None]
        states = self.proposer.observe(
            Committed(
                features=torch.cat(features, 1) if features else None,
                first_ids=first_ids,
                next_ids=torch.tensor([unseen.token_ids[1:]], device=device),
                counts=torch.tensor([len(unseen.token_ids) - 1], device=device),
                cache_lengths=lengths,
                page_table=table,
                is_prompt=True,
            )
        )
        sequence.state = states[0]


def _measured_times(executor: EngineExecutor, proposer: Proposer, tree: TreeConfig) -> PassTimes:
    """This engine's pass times, measured here and now with passes that its limits allow."""
    manifest = executor.manifest
    most_nodes = max(tree.budget, min(manifest.prefill_chunk_tokens, manifest.max_context_tokens // 2))
    sizes = sorted({tree.budget, *(size for size in MEASURED_SIZES if size <= most_nodes)})
    widths = [width for width in MEASURED_WIDTHS if width <= most_nodes]
    context = min(MEASURED_CONTEXT, manifest.max_context_tokens // 2)
    return measure_passes(executor, proposer, sizes, widths, context, PATIENCE_S)


def _root(sequence: Sequence) -> int:
    assert sequence.root_id is not None, "only sequences past their prompt are stepped"
    return sequence.root_id


def _recorded_times(executor: EngineExecutor) -> PassTimes | None:
    """What `furcate tune` measured, when it was on a device of this kind."""
    tuning = executor.manifest.tuning
    if tuning is None or tuning["device"] != str(executor.device):
        return None
    tables = ({int(size): ms for size, ms in tuning[name].items()} for name in ("verify_ms", "draft_ms"))
    verify, draft = tables
    return PassTimes(
        verify_ms=verify,
        draft_ms=draft,
        verify_sequence_ms=tuning.get("verify_sequence_ms", 0.0),
        draft_sequence_ms=tuning.get("draft_sequence_ms", 0.0),
    )
