"""One step: draft, verify, accept, commit. The whole of speculative decoding is `Step.run`.

B batch rows, N nodes, D depth of the deepest node, A = D + 1 accepted nodes at most, S drafter state width, P pages.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.acceptance.match import follow
from furcate.decoding.drafters.eagle import EagleProposer
from furcate.decoding.drafters.grow import grower_of
from furcate.decoding.drafters.hydra import HydraProposer
from furcate.decoding.drafters.medusa import MedusaProposer
from furcate.decoding.drafters.proposer import Committed, DraftRows, Proposer
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.sampling import SamplingRows, choose, choose_in_tree
from furcate.decoding.tree import pack_mask
from furcate.plugins.cache_commit.cpu import commit_paths


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The sequences of one step: where they stand and how their tokens are chosen."""

    draft: DraftRows
    sampling: SamplingRows


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step yields. token_ids[b, :num_tokens[b]] are the new tokens, the bonus last; num_nodes counts the tree's."""

    token_ids: Int64[Tensor, "B A"]
    num_tokens: Int64[Tensor, " B"]
    num_nodes: Int64[Tensor, " B"]
    states: Float[Tensor, "B S"]


@dataclass(frozen=True, kw_only=True)
class PromptChunk:
    """A piece of one sequence's prompt. `next_id` is the prompt token after it, None when it is the last piece."""

    token_ids: Int64[Tensor, "1 C"]
    cache_lengths: Int32[Tensor, " 1"]
    page_table: Int32[Tensor, "1 P"]
    next_id: int | None


class Step:
    """Steps sequences with one engine and one kind of tree. Rows are independent; the cache is the executor's."""

    def __init__(self, executor: TorchExecutor, tree: TreeConfig) -> None:
        self.executor = executor
        self.clock = executor.clock
        self.grower = grower_of(tree)
        self.proposer = None if tree.kind is TreeKind.SINGLE else proposer_of(executor)
        self.num_slots = max(self.grower.num_nodes, self.grower.num_cached_nodes, self.grower.max_depth + 1)
        """Cache slots behind the committed tokens that a step may write."""

    @torch.inference_mode()
    def run(self, rows: StepRows) -> StepResult:
        """One step of every row; K/V of the accepted nodes is committed, the rest is left to be overwritten."""
        draft, executor = rows.draft, self.executor
        with self.clock.part("draft"):
            tree = self.grower.grow(self.proposer, draft)
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
            choices = choose_in_tree(tree, outputs.logits, rows.sampling, draft.cache_lengths.long())
            accepted = follow(tree, choices)
            token_ids = tree.token_ids.gather(1, accepted.path_nodes).roll(-1, dims=1)
            token_ids.scatter_(1, accepted.num_accepted[:, None] - 1, accepted.bonus[:, None])
        with self.clock.part("commit"):
            if self.grower.num_nodes > 1:
                commit_paths(
                    executor.target_pool,
                    draft.page_table,
                    draft.cache_lengths,
                    accepted.path_nodes,
                    accepted.num_accepted,
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
            token_ids=token_ids, num_tokens=accepted.num_accepted, num_nodes=tree.num_nodes, states=states
        )

    def _observed_width(self, num_accepted: Int64[Tensor, " B"]) -> int:
        """Columns of the accepted paths worth passing on: on a CPU the longest path, in a captured graph all of them."""
        if num_accepted.device.type == "cpu":
            return int(num_accepted.max())
        return self.grower.max_depth + 1

    @torch.inference_mode()
    def prefill(self, chunk: PromptChunk, sampling: SamplingRows) -> tuple[int | None, Float[Tensor, " S"] | None]:
        """Runs a piece of a prompt. After the last piece: the first token of the answer and the drafter's state."""
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
            next_id = chunk.next_id
            if next_id is None:
                next_id = int(choose(outputs.logits[:, 0], sampling, chunk.cache_lengths.long() + num_tokens))
            states = None
            if self.proposer is not None:
                next_ids = torch.cat([chunk.token_ids[:, 1:], torch.full_like(chunk.token_ids[:, :1], next_id)], dim=1)
                committed = Committed(
                    features=outputs.features,
                    first_ids=chunk.token_ids[:, 0],
                    next_ids=next_ids,
                    counts=torch.full((1,), num_tokens, device=chunk.token_ids.device),
                    cache_lengths=chunk.cache_lengths,
                    page_table=chunk.page_table,
                )
                states = self.proposer.observe(committed)
        is_last = chunk.next_id is None
        return (next_id if is_last else None), (states[0] if is_last and states is not None else None)


def executor_features(features: Float[Tensor, "B N F"] | None, path: Int64[Tensor, "B A"]) -> Float[Tensor, "B A F"]:
    """The features of the nodes on each row's path."""
    assert features is not None, "an engine with a head yields features"
    return features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))


def proposer_of(executor: TorchExecutor) -> Proposer | None:
    """The proposer of the engine's head; None without a head."""
    if executor.head is None:
        return None
    if executor.head.kind is HeadKind.MEDUSA:
        return MedusaProposer(executor)
    if executor.head.kind is HeadKind.HYDRA:
        return HydraProposer(executor)
    return EagleProposer(executor)
