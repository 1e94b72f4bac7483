"""Records one request's steps: the trees with their draft and target probabilities, and where each path ended and why.

The drafter is wrapped, so that the head's law after every node it ran on is known; nothing else in the step changes.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.drafters.merged import MergedProposer
from furcate.decoding.drafters.proposer import Draft, DraftRows, Proposal, Proposer
from furcate.decoding.explain_report import DepthCount, Miss, NodeReport, StepReport, Verdict
from furcate.decoding.request import StepOutput
from furcate.decoding.sampling import SamplingRows, target_law
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.step import StepTrace

Path = tuple[int, ...]
"""Token ids from the root's child down; () is the root."""


class RecordingDraft:
    """A draft that notes the head's law after every node it has run on, by the node's path."""

    def __init__(self, draft: Draft, record: "RecordingProposer") -> None:
        self._draft = draft
        self._record = record
        self._paths: list[Path] = [()]
        self._note()

    @property
    def logits(self) -> Float[Tensor, "B K Vd"]:
        return self._draft.logits

    def propose(self, num_children: int) -> Proposal:
        self._record.num_children.update(dict.fromkeys(self._paths, num_children))
        return self._draft.propose(num_children)

    def descend(self, parents: Int64[Tensor, "B K"], token_ids: Int64[Tensor, "B K"]) -> None:
        self._draft.descend(parents, token_ids)
        pairs = zip(parents[0].tolist(), token_ids[0].tolist(), strict=True)
        self._paths = [(*self._paths[parent], token) for parent, token in pairs]
        self._note()

    def _note(self) -> None:
        for path, logits in zip(self._paths, self._draft.logits[0], strict=True):
            self._record.laws.setdefault(path, logits.float().softmax(-1))


class RecordingProposer:
    """A proposer whose newest draft is recorded: the head's laws, and how many children it was asked for, by path."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.laws: dict[Path, Float[Tensor, " Vd"]] = {}
        self.num_children: dict[Path, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def start(self, rows: DraftRows) -> RecordingDraft:
        self.laws, self.num_children = {}, {}
        return RecordingDraft(self._proposer.start(rows), self)

    def place_of(self, token: int) -> int | None:
        """The token's id in the head's vocabulary; None when the head does not know it."""
        law = next(iter(self.laws.values()))
        ids = self._proposer.target_token_ids(torch.arange(len(law), device=law.device))
        found = (ids == token).nonzero()
        return int(found[0]) if len(found) else None

    def prob(self, path: Path, token: int) -> float | None:
        """The head's probability of a token after a path; None where it did not run or does not know the token."""
        law, place = self.laws.get(path), self.place_of(token)
        return float(law[place]) if law is not None and place is not None else None

    def rank(self, path: Path, token: int) -> int | None:
        """The token's rank by that probability, from 1."""
        prob = self.prob(path, token)
        return None if prob is None else int((self.laws[path] > prob).sum()) + 1


class Recorder:
    """The steps of the only request of a scheduler."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any) -> None:
        self.steps: list[StepReport] = []
        self._tokenizer = tokenizer
        self._pending: StepReport | None = None
        self._num_emitted = 0
        self.drafts: list[RecordingProposer] = []
        """One a head."""
        step = scheduler._step
        self.acceptance = step.acceptance.value
        if isinstance(step.proposer, MergedProposer):
            self.drafts = [RecordingProposer(part) for part in step.proposer.parts]
            step.proposer.parts = list(self.drafts)  # pyright: ignore[reportAttributeAccessIssue]
        elif step.proposer is not None:
            self.drafts = [RecordingProposer(step.proposer)]
            step.proposer = self.drafts[0]  # pyright: ignore[reportAttributeAccessIssue]
        step.on_step = self._take

    def visible(self, token_id: int) -> str:
        """A token's text with its white space made visible."""
        text = self._tokenizer.decode([token_id])
        return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or f"<{token_id}>"

    def close_step(self, output: StepOutput) -> None:
        """Ends a step with what it emitted: nodes behind the text's end are marked as cut."""
        num_emitted = output.stats.num_emitted_tokens
        if self._pending is not None:
            step = replace(self._pending, num_emitted=max(num_emitted - self._num_emitted, 0))
            if output.finish_reason is not None:
                nodes = tuple(_cut(node, step.num_emitted) for node in step.nodes)
                step = replace(step, nodes=nodes, miss=Miss.END, why=f"the text ended ({output.finish_reason})")
            self.steps.append(step)
            self._pending = None
        self._num_emitted = num_emitted

    def acceptance_by_depth(self) -> tuple[DepthCount, ...]:
        """How often each depth was accepted, of the times that the depth above was."""
        lengths = [len(step.path) for step in self.steps]
        deepest = max((node.depth for step in self.steps for node in step.nodes), default=0)
        return tuple(
            DepthCount(
                depth=depth,
                num_reached=sum(length >= depth - 1 for length in lengths),
                num_accepted=sum(length >= depth for length in lengths),
            )
            for depth in range(1, deepest + 1)
        )

    def _take(self, trace: StepTrace) -> None:
        laws = _target_laws(trace.logits[0], trace.sampling)
        tree, accepted = trace.tree, trace.accepted
        token_ids, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
        kept = accepted.path_nodes[0, : int(accepted.num_accepted[0])].tolist()
        bonus = int(accepted.bonus[0])
        chosen = dict(zip(kept, [*(token_ids[node] for node in kept[1:]), bonus], strict=True))
        paths: list[Path] = [()]
        nodes: list[NodeReport] = []
        for node in range(int(tree.num_nodes[0])):
            parent = parents[node]
            if node > 0:
                paths.append((*paths[parent], token_ids[node]))
            report = NodeReport(
                index=node,
                parent=parent,
                depth=len(paths[node]),
                token_id=token_ids[node],
                text=self.visible(token_ids[node]),
                draft_prob=self._draft_prob(paths[parent], token_ids[node]) if node > 0 else None,
                target_prob=float(laws[parent, token_ids[node]]) if node > 0 else None,
                verdict=Verdict.ROOT,
                why="the newest token of the text",
            )
            nodes.append(self._judged(report, kept, chosen, laws) if node > 0 else report)
        miss, why = self._miss([nodes[node] for node in kept], paths[kept[-1]], bonus, nodes)
        self._pending = StepReport(
            number=len(self.steps) + 1,
            position=self._num_emitted - 1,
            nodes=tuple(nodes),
            bonus=self.visible(bonus),
            bonus_prob=float(laws[kept[-1], bonus]),
            num_emitted=0,
            miss=miss,
            why=why,
        )

    def _judged(
        self, node: NodeReport, kept: list[int], chosen: dict[int, int], laws: Float[Tensor, "N V"]
    ) -> NodeReport:
        if node.index in kept:
            return replace(node, verdict=Verdict.ACCEPTED, why="the target went this way")
        if node.parent not in chosen:
            return replace(node, verdict=Verdict.LOST, why="a node above it was rejected")
        token = chosen[node.parent]
        why = f"the target went on with {self.visible(token)!r} (p = {float(laws[node.parent, token]):.3f})"
        if node.target_prob == 0:
            why += ", and the request leaves this token no probability"
        return replace(node, verdict=Verdict.REJECTED, why=why)

    def _draft_prob(self, parent: Path, token: int) -> float | None:
        """Of several heads that drafted below the parent, the surest one's."""
        probs = [draft.prob(parent, token) for draft in self.drafts]
        return max((prob for prob in probs if prob is not None), default=None)

    def _miss(self, kept: list[NodeReport], path: Path, bonus: int, nodes: list[NodeReport]) -> tuple[Miss, str]:
        """Why the path ended after its last node, where the target went on with `bonus`."""
        last, text = kept[-1], self.visible(bonus)
        deepest = max(node.depth for node in nodes)
        if not self.drafts or last.depth == deepest:
            return Miss.DEPTH, f"the tree ends here; the target added {text!r}"
        if all(draft.place_of(bonus) is None for draft in self.drafts):
            return (
                Miss.VOCABULARY,
                f"the target's token {text!r} is not in the head's vocabulary, so it cannot be drafted",
            )
        children = [node for node in nodes[1:] if node.parent == last.index]
        if any(node.token_id == bonus for node in children):
            return Miss.CHANCE, f"{text!r} was drafted, but the rule rejected it before it was drawn"
        ranks = [(rank, draft) for draft in self.drafts if (rank := draft.rank(path, bonus)) is not None]
        if not ranks:
            return Miss.NOT_EXPANDED, f"nothing was drafted below {last.text!r}; the target added {text!r}"
        rank, draft = min(ranks, key=lambda ranked: ranked[0])
        where = f"the head ranked it {rank} (q = {draft.prob(path, bonus):.3f})"
        num_proposed = draft.num_children.get(path, len(children))
        if rank <= num_proposed:
            return Miss.BUDGET, f"the target's token {text!r} was drafted but found no room in the tree; {where}"
        return Miss.RANK, f"the target's token {text!r} is not among the {num_proposed} drafted; {where}"


def _target_laws(logits: Float[Tensor, "N V"], sampling: SamplingRows) -> Float[Tensor, "N V"]:
    """The law that the request samples from after each node; at temperature 0 that of temperature 1."""
    tensors = {name: value for name, value in vars(sampling).items() if isinstance(value, Tensor)}
    rows = replace(sampling, **{name: value.expand(len(logits)) for name, value in tensors.items()})
    return target_law(logits, rows)


def _cut(node: NodeReport, num_emitted: int) -> NodeReport:
    if node.verdict is Verdict.ACCEPTED and node.depth > num_emitted:
        return replace(node, verdict=Verdict.CUT, why="the text ended before it")
    return node
