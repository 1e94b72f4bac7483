"""A step whose stages run elsewhere: the host's side of the `staged` layout.

Same interface as `Step`, so the scheduler drives it alike. A sequence's `state` is a key here; what its last step kept is
remembered under it, and handed to the next step, which commits it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance, resolve_acceptance
from furcate.builder.engine import Engine
from furcate.builder.errors import ConfigError
from furcate.builder.scheduling_config import Reservation, SchedulingConfig
from furcate.builder.tree_config import TreeConfig
from furcate.decoding.clock import Clock
from furcate.decoding.drafters.grow import grower_of
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.sequence import Sequence
from furcate.decoding.staged_rules import check_staged
from furcate.decoding.staged_texts import json_from_text
from furcate.decoding.step import PromptChunk, PromptResult, StepResult, StepRows


class Stages(Protocol):
    """Runs a stage somewhere: "verification" and "tree_construction" for prompts, "speculative_step" for all three in a row."""

    def run(self, model_name: str, arrays: Mapping[str, np.ndarray], *, is_prompt: bool) -> dict[str, np.ndarray]: ...


class StagedEngine:
    """An engine whose networks run elsewhere: what the scheduler reads of an executor, and nothing to compute with."""

    def __init__(self, engine: Engine, stages: Stages) -> None:
        self.manifest = engine.manifest
        self.tokenizer_dir: Path = engine.tokenizer_dir
        self.stages = stages
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.clock = Clock()
        self.num_pages = -(-self.manifest.max_pool_tokens // self.manifest.page_size)
        self.target_pool = torch.empty(0)
        self.head_pool: Tensor | None = None
        self.head = self.manifest.head
        self.drafters: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a sequence's next step commits: `first_id` was the root, `ids` came after its nodes. After a prompt: nothing."""

    state: np.ndarray
    first_id: int = 0
    nodes: np.ndarray
    ids: np.ndarray
    features: np.ndarray


class StagedStep:
    """See `Step`. Rows are independent; the caches are the stages'."""

    commits_late = True

    def __init__(self, executor: StagedEngine, tree: TreeConfig, acceptance: Acceptance = Acceptance.MATCH) -> None:
        manifest = executor.manifest
        kinds = [head.kind.value for head in manifest.heads]
        self.acceptance = resolve_acceptance(acceptance, tree)
        check_staged(self.acceptance.value, kinds)
        self.executor = executor
        self.clock = executor.clock
        self.proposer = None
        grower = grower_of(tree)
        self.num_slots = max(grower.num_nodes, grower.num_cached_nodes, grower.max_depth + 1)
        self._kept: dict[int, Kept] = {}
        self._ended_keys: list[int] = []
        """To be told to the verification with the next call."""
        self._num_keys = 0

    def forget(self, state: Tensor | None) -> None:
        """Drops what is remembered of a sequence that has ended."""
        if state is not None:
            self._kept.pop(int(state[0]), None)
            self._ended_keys.append(int(state[0]))

    def run(self, rows: StepRows) -> StepResult:
        """One step of every row: one call."""
        keys = rows.draft.states[:, 0].tolist()
        kept = [self._kept[key] for key in keys]
        root_ids = rows.draft.root_ids.numpy()
        arrays = {
            "states": np.concatenate([one.state for one in kept]),
            "root_ids": root_ids[:, None],
            **_place(rows.draft.cache_lengths, rows.draft.page_table),
            **_kept_arrays(kept),
            **_sampling_arrays(rows.sampling),
            **self._key_arrays(keys),
        }
        with self.clock.part("staged_step"):
            found = self.executor.stages.run("speculative_step", arrays, is_prompt=False)
        counts = found["num_accepted"][:, 0]
        for row, (key, count) in enumerate(zip(keys, counts.tolist(), strict=True)):
            self._kept[key] = Kept(
                state=kept[row].state,
                first_id=int(root_ids[row]),
                nodes=found["path_nodes"][row, :count],
                ids=found["new_ids"][row, :count],
                features=found["path_features"][row, :count],
            )
        asks = rows.sampling.returns_log_probs
        return StepResult(
            token_ids=torch.from_numpy(found["new_ids"]),
            num_tokens=torch.from_numpy(counts).long(),
            num_nodes=torch.from_numpy(found["num_nodes"][:, 0]).long(),
            states=rows.draft.states,
            chosen_logits=torch.from_numpy(found["new_logits"]),
            log_probs=torch.from_numpy(found["new_log_probs"]) if asks else None,
        )

    def prefill(self, chunk: PromptChunk, sampling: SamplingRows) -> PromptResult | None:
        """Runs a piece of a prompt, through the target and then the drafter: two calls."""
        place = _place(chunk.cache_lengths, chunk.page_table)
        token_ids = chunk.token_ids.numpy()
        self._num_keys += 1
        key, processing = self._num_keys, sampling.processing
        arrays = {
            "tree_token_ids": token_ids, **place, **_no_tree(), **_sampling_arrays(sampling), **self._key_arrays([key])
        }  # fmt: skip
        if processing is not None and chunk.next_id is None:
            arrays["text"] = np.array([[json_from_text(processing.texts[0])]], object)
        with self.clock.part("prefill"):
            found = self.executor.stages.run("verification", arrays, is_prompt=True)
            token_id = int(found["choices"][0, 0])
            next_id = token_id if chunk.next_id is None else chunk.next_id
            arrays = {
                **place,
                "states": np.zeros((1, 1), np.float32),
                "root_ids": np.array([[next_id]]),
                "first_ids": token_ids[:, :1],
                "kept_ids": np.append(token_ids[:, 1:], [[next_id]], axis=1),
                "kept_features": found["features"],
                "num_kept": np.array([[token_ids.shape[1]]], np.int32),
            }
            state = self.executor.stages.run("tree_construction", arrays, is_prompt=True)["new_states"]
        if chunk.next_id is not None:
            return None
        self._kept[key] = Kept(
            state=state,
            nodes=np.zeros(0, np.int64),
            ids=np.zeros(0, np.int64),
            features=found["features"][0, :0],
        )
        return PromptResult(
            token_id=token_id,
            chosen_logit=float(found["choice_logits"][0, 0]),
            log_prob=float(found["choice_log_probs"][0, 0]) if sampling.returns_log_probs else None,
            state=torch.tensor([key]),
        )

    def _key_arrays(self, keys: list[int]) -> dict[str, np.ndarray]:
        ended = np.array([self._ended_keys or [0]] * len(keys), np.int64)
        self._ended_keys = []
        return {"keys": np.array([[key] for key in keys], np.int64), "ended_keys": ended}


class StagedScheduler(Scheduler):
    """A scheduler whose steps run as stages. Every step drafts the whole tree, pages are promised in full, no prefix is kept."""

    step_type = StagedStep

    @classmethod
    def of(cls, engine: Engine, stages: Stages, scheduling: SchedulingConfig | None = None) -> "StagedScheduler":
        """A scheduler of this engine; ConfigError where it cannot be served in stages."""
        scheduling = replace(scheduling or SchedulingConfig(), prefix_reuse=False)
        if scheduling.reservation is not Reservation.FULL:
            raise ConfigError(
                f"layout staged promises pages in full, and reservation is {scheduling.reservation}; use full, or --layout fused."
            )
        staged = StagedEngine(engine, stages)
        return cls(staged, is_adaptive=False, scheduling=scheduling)  # pyright: ignore[reportArgumentType]

    def _end(self, sequence: Sequence, *, is_kept: bool = True) -> None:
        super()._end(sequence, is_kept=is_kept)
        self._step.forget(sequence.state)  # pyright: ignore[reportAttributeAccessIssue]


def _kept_arrays(kept: list[Kept]) -> dict[str, np.ndarray]:
    """What rows kept, padded to the longest path (at least one column: empty tensors do not travel)."""
    width = max(1, *(len(one.ids) for one in kept)) if kept else 1
    features = np.zeros((len(kept), width, kept[0].features.shape[-1]), np.float32)
    ids, nodes = np.zeros((len(kept), width), np.int64), np.zeros((len(kept), width), np.int64)
    for row, one in enumerate(kept):
        count = len(one.ids)
        features[row, :count], ids[row, :count], nodes[row, :count] = one.features, one.ids, one.nodes
    return {
        "kept_features": features,
        "kept_ids": ids,
        "kept_nodes": nodes,
        "num_kept": np.array([[len(one.ids)] for one in kept], np.int32),
        "first_ids": np.array([[one.first_id] for one in kept], np.int64),
    }


def _no_tree() -> dict[str, np.ndarray]:
    """A prompt's chunk has no tree and commits nothing."""
    return {
        "kept_ids": np.zeros((1, 1), np.int64),
        "tree_parents": np.zeros((1, 1), np.int64),
        "num_nodes": np.zeros((1, 1), np.int32),
        "kept_nodes": np.zeros((1, 1), np.int64),
        "num_kept": np.zeros((1, 1), np.int32),
    }


def _place(cache_lengths: Tensor, page_table: Tensor) -> dict[str, np.ndarray]:
    return {"cache_lengths": cache_lengths.numpy()[:, None], "page_table": page_table.numpy()}


def _sampling_arrays(rows: SamplingRows) -> dict[str, np.ndarray]:
    num_rows = len(rows.temperature)
    min_p = torch.zeros(num_rows) if rows.min_p is None else rows.min_p
    tensors = {
        "temperature": rows.temperature, "top_k": rows.top_k, "top_p": rows.top_p, "min_p": min_p, "seeds": rows.seeds,
    }  # fmt: skip
    asks = np.full((num_rows, 1), rows.returns_log_probs)
    return {**{name: tensor.numpy()[:, None] for name, tensor in tensors.items()}, "returns_log_probs": asks}
