"""One step: draft, verify, accept, commit. The whole of speculative decoding is `Step.run`.

B batch rows, N nodes, D depth of the deepest node, A = D + 1 accepted nodes at most, S drafter state width, P pages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance, resolve_acceptance
from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.spec import HeadKind
from furcate.builder.tensorrt_profiles import batch_buckets
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.acceptance.accepted import Accepted
from furcate.decoding.acceptor import DRAFT_KINDS, accept
from furcate.decoding.drafters.eagle import EagleProposer
from furcate.decoding.drafters.grow import Grower, grower_of
from furcate.decoding.drafters.hydra import HydraProposer
from furcate.decoding.drafters.medusa import MedusaProposer
from furcate.decoding.drafters.merged import MergedProposer
from furcate.decoding.drafters.model import ModelProposer
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposer
from furcate.decoding.executors.executor import CommitRows, EngineExecutor
from furcate.decoding.logits.log_probs import chosen_logits, path_log_probs
from furcate.decoding.sampling import SamplingRows, choose
from furcate.decoding.step_graphs import StepGraphs
from furcate.decoding.tree import Tree, pack_mask
from furcate.decoding.tree_shape import single_node_shape


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The sequences of one step: where they stand and how their tokens are chosen."""

    draft: DraftRows
    sampling: SamplingRows


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step yields. token_ids[b, :num_tokens[b]] are the new tokens, the bonus last; num_nodes counts the tree's.

    chosen_logits are what the tokens were chosen by, after processing; log_probs are None when no row asks for them.
    """

    token_ids: Int64[Tensor, "B A"]
    num_tokens: Int64[Tensor, " B"]
    num_nodes: Int64[Tensor, " B"]
    states: Float[Tensor, "B S"]
    chosen_logits: Float[Tensor, "B A"]
    log_probs: Float[Tensor, "B A"] | None
    features: Float[Tensor, "B 1 F"] | None = None
    """Of a step without a drafter: what one would have read."""


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """What the last piece of a prompt yields: the answer's first token as a step's result, and the drafter's state."""

    token_id: int
    chosen_logit: float
    log_prob: float | None
    state: Float[Tensor, " S"] | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What a step did, for whoever looks on. `logits` are the target's after processing."""

    tree: Tree
    logits: Float[Tensor, "B N V"]
    accepted: Accepted
    sampling: SamplingRows


@dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """A piece of one sequence's prompt. `next_id` is the prompt token after it, None when it is the last piece."""

    token_ids: Int64[Tensor, "1 C"]
    cache_lengths: Int32[Tensor, " 1"]
    page_table: Int32[Tensor, "1 P"]
    next_id: int | None


class Step:
    """Steps sequences with one engine and one kind of tree. Rows are independent; the cache is the executor's."""

    commits_late = False
    """True where accepted nodes stay behind the committed tokens until the next step begins."""

    def __init__(self, executor: EngineExecutor, tree: TreeConfig, acceptance: Acceptance = Acceptance.MATCH) -> None:
        self.executor = executor
        self.clock = executor.clock
        self.acceptance = resolve_acceptance(acceptance, tree)
        self.proposer = None if tree.kind is TreeKind.SINGLE else proposer_of(executor, tree.max_depth)
        self.grower = grower_of(tree)
        drawing = DRAFT_KINDS.get(self.acceptance)
        self.drawing_grower = self.grower if drawing is None else grower_of(tree, drawing)
        """Drafts for batches that are not greedy."""
        self.num_slots = max(_num_slots(self.grower, self.proposer), _num_slots(self.drawing_grower, self.proposer))
        """Cache slots behind the committed tokens that a step may write."""
        self.on_step: Callable[[StepTrace], None] | None = None
        """Called with every step's trace (`furcate explain`)."""
        self.graphs: StepGraphs | None = None
        """Captured steps, on a GPU; None runs every step operation by operation."""
        if executor.device.type == "cuda" and executor.is_capturable:
            buckets = batch_buckets(executor.manifest.max_batch_size)
            self.graphs = StepGraphs(executor, self.run_uncaptured, buckets, self.num_slots)

    @torch.inference_mode()
    def run(self, rows: StepRows) -> StepResult:
        """One step of every row; K/V of the accepted nodes is committed, the rest is left to be overwritten."""
        if self.graphs is not None and self.on_step is None:
            result = self.graphs.run(rows)
            if result is not None:
                return result
        return self.run_uncaptured(rows)

    def run_uncaptured(self, rows: StepRows) -> StepResult:
        """The step itself: operations of fixed shape which, on a GPU, read nothing back to the host."""
        draft, executor = rows.draft, self.executor
        with self.clock.part("draft"):
            grower = self.grower if rows.sampling.is_greedy else self.drawing_grower
            tree = grower.grow(self.proposer, draft, rows.sampling)
        with self.clock.part("verify"):
            inputs = PassInputs(
                token_ids=tree.token_ids,
                positions=(draft.cache_lengths[:, None] + tree.depths).int(),
                tree_mask=pack_mask(tree.ancestor_mask),
                cache_lengths=draft.cache_lengths,
                page_table=draft.page_table,
            )
            outputs = executor.target_pass(inputs)
        with self.clock.part("accept"):
            sampling, logits = rows.sampling, outputs.logits
            if sampling.processing is not None:
                logits = sampling.processing.process(logits, tree)
            accepted = accept(self.acceptance, tree, logits, sampling, draft.cache_lengths.long())
            token_ids = tree.token_ids.gather(1, accepted.path_nodes).roll(-1, dims=1)
            token_ids.scatter_(1, accepted.num_accepted[:, None] - 1, accepted.bonus[:, None])
            chosen = chosen_logits(logits, accepted.path_nodes, token_ids)
            asks = sampling.returns_log_probs
            log_probs = path_log_probs(outputs.logits, accepted.path_nodes, token_ids) if asks else None
            if self.on_step is not None:
                self.on_step(StepTrace(tree=tree, logits=logits, accepted=accepted, sampling=sampling))
        with self.clock.part("commit"):
            if self.grower.num_nodes > 1:
                executor.commit(
                    CommitRows(
                        page_table=draft.page_table,
                        cache_lengths=draft.cache_lengths,
                        path_nodes=accepted.path_nodes,
                        num_accepted=accepted.num_accepted,
                    )
                )
            states = draft.states
            if self.proposer is not None:
                width = self._observed_width(accepted.num_accepted)
                path = accepted.path_nodes[:, :width]
                committed = Committed(
                    features=executor_features(outputs.features, path),
                    first_ids=draft.root_ids,
                    next_ids=token_ids[:, :width],
                    counts=accepted.num_accepted,
                    cache_lengths=draft.cache_lengths,
                    page_table=draft.page_table,
                )
                states = self.proposer.observe(committed)
        return StepResult(
            token_ids=token_ids,
            num_tokens=accepted.num_accepted,
            num_nodes=tree.num_nodes,
            states=states,
            chosen_logits=chosen,
            log_probs=log_probs,
            features=outputs.features if self.proposer is None else None,
        )

    def _observed_width(self, num_accepted: Int64[Tensor, " B"]) -> int:
        """Columns of the accepted paths worth passing on: on a CPU the longest path, in a captured graph all of them."""
        if num_accepted.device.type == "cpu":
            return int(num_accepted.max())
        return self.grower.max_depth + 1

    @torch.inference_mode()
    def prefill(self, chunk: PromptChunk, sampling: SamplingRows) -> PromptResult | None:
        """Runs a piece of a prompt. The first token of the answer and the drafter's state after the last piece, else None."""
        num_tokens = chunk.token_ids.shape[1]
        steps = torch.arange(num_tokens, dtype=torch.int32, device=chunk.token_ids.device)
        inputs = PassInputs(
            token_ids=chunk.token_ids,
            positions=chunk.cache_lengths[:, None] + steps,
            tree_mask=None,
            cache_lengths=chunk.cache_lengths,
            page_table=chunk.page_table,
        )
        with self.clock.part("prefill"):
            last_row = torch.full((1, 1), num_tokens - 1, device=chunk.token_ids.device)
            outputs = self.executor.target_pass(inputs, last_row)
            first, next_id = None, chunk.next_id
            if next_id is None:
                first = _first_token(outputs.logits, chunk, sampling)
                next_id = first.token_id
            if self.proposer is not None:
                next_ids = torch.cat([chunk.token_ids[:, 1:], torch.full_like(chunk.token_ids[:, :1], next_id)], dim=1)
                committed = Committed(
                    features=outputs.features,
                    first_ids=chunk.token_ids[:, 0],
                    next_ids=next_ids,
                    counts=torch.full((1,), num_tokens, device=chunk.token_ids.device),
                    cache_lengths=chunk.cache_lengths,
                    page_table=chunk.page_table,
                    is_prompt=True,
                )
                states = self.proposer.observe(committed)
                first = replace(first, state=states[0]) if first is not None else None
        return first


def _first_token(logits: Float[Tensor, "1 1 V"], chunk: PromptChunk, sampling: SamplingRows) -> PromptResult:
    """The token that the target chooses after a whole prompt."""
    processed = logits
    if sampling.processing is not None:
        processed = sampling.processing.process(logits, single_node_shape().tree(chunk.token_ids[:, -1:]))
    token_ids = choose(processed[:, 0], sampling, chunk.cache_lengths.long() + chunk.token_ids.shape[1])
    log_prob = None
    if sampling.returns_log_probs:
        log_prob = float(path_log_probs(logits, torch.zeros_like(token_ids[:, None]), token_ids[:, None]))
    token_id = int(token_ids)
    return PromptResult(token_id=token_id, chosen_logit=float(processed[0, 0, token_id]), log_prob=log_prob)


def _num_slots(grower: Grower, proposer: Proposer | None) -> int:
    num_held = proposer.num_held_slots if proposer is not None else 0
    return max(grower.num_nodes, num_held + grower.num_cached_nodes, num_held + grower.max_depth + 1)


def executor_features(
    features: Float[Tensor, "B N F"] | None, path: Int64[Tensor, "B A"]
) -> Float[Tensor, "B A F"] | None:
    """The features of the nodes on each row's path; None where the drafter reads none."""
    if features is None:
        return None
    return features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))


def proposer_of(executor: EngineExecutor, max_depth: int) -> Proposer | None:
    """The proposer of the engine's head or draft model, for trees of this depth; None without one. Several are merged."""
    if executor.head is None:
        return None
    if len(executor.drafters) > 1:
        proposers = [_proposer_of_one(drafter, max_depth) for drafter in executor.drafters]
        hidden_size = executor.manifest.target.hidden_size
        return MergedProposer(proposers, [hidden_size * len(head.feature_layers) for head in executor.manifest.heads])
    return _proposer_of_one(executor, max_depth)


def _proposer_of_one(executor: EngineExecutor, max_depth: int) -> Proposer:
    assert executor.head is not None
    if executor.head.kind is HeadKind.MEDUSA:
        return MedusaProposer(executor)
    if executor.head.kind is HeadKind.HYDRA:
        return HydraProposer(executor)
    if executor.head.kind is HeadKind.MODEL:
        return ModelProposer(executor, max_depth)
    return EagleProposer(executor)
