"""The stages of a step as separate parts that only exchange arrays: what the `staged` layout runs, each in a process of its own.

A step is: construct a tree, verify it, accept a path. The accepted path is committed when the next step begins, by whoever holds
the cache: the target's by the verification, the drafter's by the tree construction. K/V and logits never leave their process.

B batch rows, N nodes, A accepted nodes at most, C tokens of a prompt chunk, F feature width, S drafter state width, P pages.
Every array's first dimension is B, and a number for each row is [B, 1].
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from furcate.builder.network.inputs import PassInputs, TargetOutputs
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.acceptance.match import follow
from furcate.decoding.drafters.grow import grower_of
from furcate.decoding.drafters.proposer import Committed, DraftRows
from furcate.decoding.executors.executor import CommitRows, EngineExecutor
from furcate.decoding.logits.log_probs import chosen_logits, path_log_probs
from furcate.decoding.logits.processing import LogitsProcessing
from furcate.decoding.sampling import SamplingRows, choose, choose_in_tree
from furcate.decoding.staged_texts import StagedTexts
from furcate.decoding.step import executor_features, proposer_of
from furcate.decoding.tree import Tree, pack_mask, tree_from_parents
from furcate.decoding.tree_shape import single_node_shape

Arrays = Mapping[str, np.ndarray]


class TreeConstruction:
    """Drafts trees. It holds the drafter and its cache; what it remembers of a sequence travels as `states`."""

    def __init__(self, executor: EngineExecutor, tree: TreeConfig) -> None:
        self._executor = executor
        self._proposer = None if tree.kind is TreeKind.SINGLE else proposer_of(executor, tree.max_depth)
        self._grower = grower_of(tree)

    @torch.inference_mode()
    def run(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The trees of sequences whose last accepted paths (`kept_*`, `num_kept`) the drafter takes in first.

        A row with `num_kept` 0 has just left its prompt: its `states` are what `run_prompt` gave.
        """
        lengths, table = _place(arrays, self._executor)
        counts = self._tensor(arrays["num_kept"]).squeeze(1).long()
        states = self._tensor(arrays["states"]).to(self._executor.dtype)
        rows = counts.nonzero().squeeze(1)
        if self._proposer is not None and len(rows):
            kept = Committed(
                features=self._tensor(arrays["kept_features"]).to(self._executor.dtype)[rows],
                first_ids=self._tensor(arrays["first_ids"]).squeeze(1)[rows],
                next_ids=self._tensor(arrays["kept_ids"])[rows],
                counts=counts[rows],
                cache_lengths=lengths[rows] - counts[rows].int(),
                page_table=table[rows],
            )
            states[rows] = self._proposer.observe(kept)
        root_ids = self._tensor(arrays["root_ids"]).squeeze(1)
        draft = DraftRows(states=states, root_ids=root_ids, cache_lengths=lengths, page_table=table)
        tree = self._grower.grow(self._proposer, draft, greedy_rows(len(root_ids), root_ids.device))
        return {
            "tree_token_ids": _array(tree.token_ids),
            "tree_parents": _array(tree.parents),
            "num_nodes": _array(tree.num_nodes[:, None].int()),
            "new_states": _array(states.float()),
        }

    @torch.inference_mode()
    def run_prompt(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """What the drafter remembers after a chunk of one prompt: [1, S]."""
        lengths, table = _place(arrays, self._executor)
        next_ids = self._tensor(arrays["kept_ids"])
        states = torch.zeros(1, 1)
        if self._proposer is not None:
            committed = Committed(
                features=self._tensor(arrays["kept_features"]).to(self._executor.dtype),
                first_ids=self._tensor(arrays["first_ids"]).squeeze(1),
                next_ids=next_ids,
                counts=torch.full((1,), next_ids.shape[1], device=next_ids.device),
                cache_lengths=lengths,
                page_table=table,
                is_prompt=True,
            )
            states = self._proposer.observe(committed)
        return {
            "tree_token_ids": np.zeros((1, 1), np.int64),
            "tree_parents": np.zeros((1, 1), np.int64),
            "num_nodes": np.zeros((1, 1), np.int32),
            "new_states": _array(states.float()),
        }

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._executor.device)


class Verification:
    """Runs the target over trees. It holds the target and its cache, and the texts of requests that process logits."""

    def __init__(self, executor: EngineExecutor, tree: TreeConfig) -> None:
        self._executor = executor
        self._max_depth = tree.max_depth
        self._texts = StagedTexts(executor)

    @torch.inference_mode()
    def run(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The target's choices after the nodes of the path it takes, once the last accepted paths are committed."""
        lengths, table = _place(arrays, self._executor)
        self._commit(arrays, lengths, table)
        tree = tree_of(arrays, self._max_depth, self._executor.device)
        inputs = PassInputs(
            token_ids=tree.token_ids,
            positions=(lengths[:, None] + tree.depths).int(),
            tree_mask=pack_mask(tree.ancestor_mask),
            cache_lengths=lengths,
            page_table=table,
        )
        outputs = self._executor.target_pass(inputs)
        rows = self._sampling_rows(arrays)
        processing = self._texts.processing(arrays)
        processed = outputs.logits if processing is None else processing.process(outputs.logits, tree)
        choices = choose_in_tree(tree, processed, rows, lengths.long())
        return self._outputs(outputs, processed, choices, rows)

    @torch.inference_mode()
    def run_prompt(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The target's choice after a chunk of one prompt [1, 1], and the features of its tokens [1, C, F]."""
        lengths, table = _place(arrays, self._executor)
        token_ids = self._tensor(arrays["tree_token_ids"])
        num_tokens = token_ids.shape[1]
        steps = torch.arange(num_tokens, dtype=torch.int32, device=token_ids.device)
        inputs = PassInputs(
            token_ids=token_ids,
            positions=lengths[:, None] + steps,
            tree_mask=None,
            cache_lengths=lengths,
            page_table=table,
        )
        outputs = self._executor.target_pass(inputs, torch.full((1, 1), num_tokens - 1, device=token_ids.device))
        rows = self._sampling_rows(arrays)
        processed, text = outputs.logits, self._texts.of_prompt(arrays)
        if text is not None:
            processing = LogitsProcessing([0], [text], token_ids.device)
            processed = processing.process(processed, single_node_shape().tree(token_ids[:, -1:]))
        choices = choose(processed[:, 0], rows, lengths.long() + num_tokens)[:, None]
        if text is not None:
            text.extend(choices[0].tolist())
        return self._outputs(outputs, processed, choices, rows)

    def _commit(self, arrays: Arrays, lengths: Tensor, table: Tensor) -> None:
        counts = self._tensor(arrays["num_kept"]).squeeze(1).long()
        rows = counts.nonzero().squeeze(1)
        if len(rows):
            before = lengths[rows] - counts[rows].int()
            nodes = self._tensor(arrays["kept_nodes"])[rows]
            self._executor.commit(
                CommitRows(page_table=table[rows], cache_lengths=before, path_nodes=nodes, num_accepted=counts[rows])
            )

    def _outputs(
        self, outputs: TargetOutputs, processed: Tensor, choices: Tensor, rows: SamplingRows
    ) -> dict[str, np.ndarray]:
        nodes = torch.arange(choices.shape[1], device=choices.device).expand_as(choices)
        tokens = choices.clamp(min=0)
        values = chosen_logits(processed, nodes, tokens).float()
        log_probs = torch.zeros_like(values)
        if rows.returns_log_probs:
            log_probs = path_log_probs(outputs.logits, nodes, tokens)
        features = processed.new_zeros(len(choices), 1, 1) if outputs.features is None else outputs.features
        return {
            "choices": _array(choices),
            "choice_logits": _array(values),
            "choice_log_probs": _array(log_probs),
            "features": _array(features.float()),
        }

    def _sampling_rows(self, arrays: Arrays) -> SamplingRows:
        temperature, top_p, min_p = (arrays[name].reshape(-1) for name in ("temperature", "top_p", "min_p"))
        top_k, vocab_size = arrays["top_k"].reshape(-1), self._executor.manifest.target.vocab_size
        limited = top_k[top_k < vocab_size]
        return SamplingRows(
            temperature=self._tensor(temperature),
            top_k=self._tensor(top_k),
            top_p=self._tensor(top_p),
            seeds=self._tensor(arrays["seeds"].reshape(-1)),
            is_greedy=not temperature.any(),
            largest_top_k=int(limited.max()) if limited.size else None,
            uses_top_p=bool(top_p.min() < 1),
            min_p=self._tensor(min_p) if min_p.any() else None,
            returns_log_probs=bool(arrays["returns_log_probs"].any()),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._executor.device)


@torch.inference_mode()
def accept(arrays: Arrays, max_depth: int) -> dict[str, np.ndarray]:
    """The path that the target's choices spell in each tree, what is new on it (the bonus last), and its nodes' features."""
    tree = tree_of(arrays, max_depth, torch.device("cpu"))
    choices, values, log_probs, features = (
        torch.from_numpy(np.array(arrays[name]))
        for name in ("choices", "choice_logits", "choice_log_probs", "features")
    )
    accepted = follow(tree, choices)
    path = accepted.path_nodes
    kept = executor_features(features, path if features.shape[1] > 1 else path * 0)
    assert kept is not None
    return {
        "path_nodes": _array(path),
        "num_accepted": _array(accepted.num_accepted[:, None].int()),
        "new_ids": _array(choices.gather(1, path)),
        "new_logits": _array(values.gather(1, path)),
        "new_log_probs": _array(log_probs.gather(1, path)),
        "path_features": _array(kept),
    }


def tree_of(arrays: Arrays, max_depth: int, device: torch.device) -> Tree:
    """The trees that `TreeConstruction` gave."""
    token_ids, parents, num_nodes = (
        torch.from_numpy(np.array(arrays[name])).to(device) for name in ("tree_token_ids", "tree_parents", "num_nodes")
    )
    return tree_from_parents(token_ids, parents, num_nodes.squeeze(1).long(), max_depth)


def greedy_rows(num_rows: int, device: torch.device) -> SamplingRows:
    """What a drafter of deterministic trees is told of sampling: nothing that it reads."""
    ones = torch.ones(num_rows, device=device)
    return SamplingRows(
        temperature=ones * 0, top_k=ones.long(), top_p=ones, seeds=ones.long(), is_greedy=True, largest_top_k=None,
        uses_top_p=False,
    )  # fmt: skip


def _place(arrays: Arrays, executor: EngineExecutor) -> tuple[Tensor, Tensor]:
    """Committed lengths [B] and page tables [B, P]."""
    lengths, table = (torch.from_numpy(np.array(arrays[name])) for name in ("cache_lengths", "page_table"))
    return lengths.squeeze(1).to(executor.device), table.to(executor.device)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
