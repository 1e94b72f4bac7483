"""Trees that follow their luck: each step drafts the whole tree, a small one or nothing, whichever should yield most.

What a tree yields is learned per sequence from what was accepted lately; what it costs comes from the engine's own pass times,
and grows with the batch. Text that the drafter cannot predict is soon decoded plainly, with a small tree tried now and then,
ever more rarely. Features of plainly decoded tokens are kept, so that the drafter catches up in one pass when it is tried again.

Only for sample-and-match (and greedy), whose text does not depend on the trees.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.errors import ConfigError
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposer
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.sequence import Sequence
from furcate.decoding.step import Step, StepResult
from furcate.decoding.tune_measure import PassTimes, measure_passes

FIRST_GAIN = 1.0
"""Drafts a step that a new sequence is thought to have accepted, and one that is tried again."""
LEARNING_RATE = 0.4
SMALL_SHARE = 0.75
"""What a small tree has accepted, as a share of the whole tree's."""
MEASURED_SIZES = (1, 4, 8, 16, 32, 128)
"""Nodes of the passes that are timed; a batch of 32 small trees has about as many as the last."""
MEASURED_WIDTHS = (1, 4, 32)
"""Nodes of the draft passes that are timed."""
MEASURED_CONTEXT = 64
"""Tokens in the cache before the passes that are timed."""
PATIENCE_S = 1.0
"""Of timing passes while an engine is loaded."""
FIRST_WAIT, LONGEST_WAIT = 16, 128
"""Plain steps before a tree is tried again; doubled after each try in vain."""


@dataclass
class Pulse:
    """What is known of one sequence's luck, and the tokens that its drafter has not seen."""

    gain: float = FIRST_GAIN
    wait: int = FIRST_WAIT
    num_plain: int = 0
    unseen_from: int = 0
    """Cache length when the drafter last saw the text."""
    unseen_ids: list[int] = field(default_factory=list)
    """The root of that time, and every token since."""
    features: list[Tensor | None] = field(default_factory=list)

    @property
    def hoped_gain(self) -> float:
        """The gain to reckon with: renewed hope once it is time to try again."""
        return max(self.gain, FIRST_GAIN) if self.num_plain >= self.wait else self.gain

    def learn(self, num_accepted: int, share: float) -> None:
        """Takes in what a tree had accepted."""
        self.gain += LEARNING_RATE * (num_accepted / share - self.gain)
        self.wait = (
            FIRST_WAIT if num_accepted > 0 else min(2 * self.wait, LONGEST_WAIT) if self.num_plain else self.wait
        )
        self.num_plain = 0


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One size of tree: its nodes, draft passes and their width, and its share of the whole tree's gain."""

    num_nodes: int
    num_passes: int
    width: int
    share: float

    @classmethod
    def of(cls, tree: TreeConfig, share: float) -> "Rung":
        return cls(num_nodes=tree.budget, num_passes=tree.max_depth - 1, width=max(tree.top_k, 1), share=share)

    def step_ms(self, times: PassTimes, batch: int) -> float:
        """The predicted time of a step."""
        drafting = times.draft(self.num_passes, batch * self.width, batch) if self.num_passes >= 0 else 0.0
        return times.verify(batch * self.num_nodes, batch) + drafting


def best_rung(rungs: list[Rung], times: PassTimes, pulses: list[Pulse]) -> int:
    """The rung of most tokens a second for a batch of these sequences; of equals the smallest."""
    speeds = []
    for rung in rungs:
        tokens = sum(1 + min(rung.share * pulse.hoped_gain, rung.num_passes + 1) for pulse in pulses)
        speeds.append(tokens / rung.step_ms(times, len(pulses)))
    return speeds.index(max(speeds))


def smaller_tree(tree: TreeConfig) -> TreeConfig:
    """A tree of a few nodes of the same kind."""
    if tree.kind is TreeKind.CHAIN:
        length = max(1, tree.depth // 2)
        return replace(tree, budget=length + 1, depth=length)
    if tree.kind is TreeKind.STATIC:
        choices = tuple(path for path in tree.choices if len(path) <= 2)[:5]
        depth, top_k = max(map(len, choices)), 1 + max(map(max, choices))
        return replace(tree, choices=choices, budget=len(choices) + 1, depth=depth, top_k=top_k, name="small")
    depth, top_k = min(tree.depth, 1), min(tree.top_k, 3)
    budget = min(tree.budget, 6, 1 + top_k + depth * top_k * top_k)
    return TreeConfig(kind=TreeKind.DYNAMIC, budget=budget, depth=depth, top_k=top_k)


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
        small = smaller_tree(tree)
        plain = TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single")
        self.executor, self.proposer = executor, whole.proposer
        self.steps = [Step(executor, plain), Step(executor, small), whole]
        # A draft model's states have the width of the whole tree's.
        self.steps[1].proposer = whole.proposer
        self.rungs = [Rung.of(plain, 0.0), Rung.of(small, SMALL_SHARE), Rung.of(tree, 1.0)]
        self.times = _recorded_times(executor) or _measured_times(executor, whole.proposer, tree)
        self.pulses: dict[int, Pulse] = {}

    def step_for(self, sequences: list[Sequence]) -> Step:
        """The step to run now; the drafter has then seen all of these sequences' text if it needs to."""
        pulses = [self.pulses.setdefault(sequence.request.request_id, Pulse()) for sequence in sequences]
        step = self.steps[best_rung(self.rungs, self.times, pulses)]
        if step is not self.steps[0]:
            for sequence, pulse in zip(sequences, pulses, strict=True):
                self._catch_up(sequence, pulse)
        return step

    def learn(self, step: Step, sequences: list[Sequence], result: StepResult) -> None:
        """Takes in what a step gave; called while the sequences still stand where they stood before it."""
        counts, token_ids = result.num_tokens.tolist(), result.token_ids.tolist()
        for row, sequence in enumerate(sequences):
            pulse = self.pulses[sequence.request.request_id]
            if step is not self.steps[0]:
                pulse.learn(counts[row] - 1, self.rungs[self.steps.index(step)].share)
                continue
            if not pulse.unseen_ids:
                pulse.unseen_from, pulse.unseen_ids = sequence.cache_length, [_root(sequence)]
            pulse.num_plain += 1
            pulse.unseen_ids += token_ids[row][: counts[row]]
            pulse.features.append(result.features[row : row + 1] if result.features is not None else None)

    def forget(self, request_id: int) -> None:
        """Drops what is known of a request that has ended."""
        self.pulses.pop(request_id, None)

    @torch.inference_mode()
    def _catch_up(self, sequence: Sequence, pulse: Pulse) -> None:
        if not pulse.unseen_ids:
            return
        device = self.executor.device
        lengths = torch.tensor([pulse.unseen_from], dtype=torch.int32, device=device)
        table = torch.tensor([sequence.pages], dtype=torch.int32, device=device)
        first_ids = torch.tensor(pulse.unseen_ids[:1], device=device)
        if self.proposer.num_held_slots > 0 and sequence.state is not None:
            # A draft model reads what it was last told of when it starts a draft: it must, before it can go on from there.
            self.proposer.start(
                DraftRows(states=sequence.state[None], root_ids=first_ids, cache_lengths=lengths, page_table=table)
            )
        features = [piece for piece in pulse.features if piece is not None]
        states = self.proposer.observe(
            Committed(
                features=torch.cat(features, 1) if features else None,
                first_ids=first_ids,
                next_ids=torch.tensor([pulse.unseen_ids[1:]], device=device),
                counts=torch.tensor([len(pulse.unseen_ids) - 1], device=device),
                cache_lengths=lengths,
                page_table=table,
                is_prompt=True,
            )
        )
        sequence.state = states[0]
        pulse.unseen_ids, pulse.features = [], []


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
