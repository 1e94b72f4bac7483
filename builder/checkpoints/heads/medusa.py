"""Medusa heads (arXiv 2401.10774) in their four layouts.

v0.1 and v1.0 store `{i}.{j}.linear.*` and an own `{i}.{blocks}.weight`; the trainer's layout lacks the latter (the target's
lm_head serves); vLLM's is `blocks.{i}.layers.{j}.*`, `lm_heads.{i}.weight` (or one `lm_head.weight`) and `token_map`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.builder.checkpoints.heads.checkpoint import HeadCheckpoint
from furcate.builder.checkpoints.heads.draft_vocabulary import ascending_map
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.named import NamedTensors, Part, TensorPlan
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import HeadKind, HeadSpec

_BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.weight")


@dataclass(frozen=True)
class _Layout:
    """Where a layout keeps its blocks, and the stored name of each head's vocabulary head (None: the target's)."""

    block: str
    lm_heads: tuple[str | None, ...]
    num_blocks: int

    @property
    def num_heads(self) -> int:
        return len(self.lm_heads)


def read_medusa(source: HeadSource) -> HeadCheckpoint:
    """Medusa heads. Their number is counted from the stored names, because v0.1 configurations are wrong about it."""
    layout = _layout(source)
    source.check_hidden_size(source.shape(f"{layout.block.format(i=0, j=0)}.weight")[0], "the first block")
    _compare_with_config(source, layout)
    ids, rows = _vocabulary(source, layout)
    spec = HeadSpec(
        kind=HeadKind.MEDUSA,
        hidden_size=source.target.hidden_size,
        target_hidden_size=source.target.hidden_size,
        vocab_size=source.target.vocab_size,
        draft_vocab_size=source.target.vocab_size if ids is None else len(ids),
        feature_layers=(source.target.num_layers,),
        num_heads=layout.num_heads,
        num_blocks=layout.num_blocks,
        owns_lm_head=layout.lm_heads[0] is not None,
    )
    weights = _plan(source, spec, layout, (ids, rows))
    return HeadCheckpoint(spec, weights, tuple(source.warnings), source.path)


def _layout(source: HeadSource) -> _Layout:
    found = [match for name in source.stored if (match := _BLOCK.fullmatch(name))]
    pairs = {(int(match[1] or match[3] or 0), int(match[2] or match[4] or 0)) for match in found}
    heads, blocks = 1 + max(i for i, _ in pairs), 1 + max(j for _, j in pairs)
    if len(pairs) != heads * blocks:
        raise CheckpointError(
            f"{source.path} holds {len(pairs)} Medusa blocks where {heads} heads of {blocks} need {heads * blocks}; "
            "the head is incomplete."
        )
    if found[0][1] is not None:
        own = [f"{i}.{blocks}.weight" for i in range(heads)]
        return _Layout("{i}.{j}.linear", _present(source, own), blocks)
    own = [f"lm_heads.{i}.weight" for i in range(heads)]
    shared = next((name for name in ("lm_head.weight", own[0]) if name in source.stored), None)
    is_shared = source.config.get("original_lm_head", False) or "lm_head.weight" in source.stored
    return _Layout("blocks.{i}.layers.{j}", (shared,) * heads if is_shared else _present(source, own), blocks)


def _present(source: HeadSource, names: list[str]) -> tuple[str | None, ...]:
    """The names themselves when at least one is stored (a missing one is then an error of the plan), else all None."""
    return tuple(names) if any(name in source.stored for name in names) else (None,) * len(names)


def _compare_with_config(source: HeadSource, layout: _Layout) -> None:
    for fields, number, what in (
        (("medusa_num_heads", "num_heads"), layout.num_heads, "heads"),
        (("medusa_num_layers",), layout.num_blocks, "blocks per head"),
    ):
        said = next((source.config[field] for field in fields if source.config.get(field) is not None), number)
        if said != number:
            source.warnings.append(
                f"config.json says {said} Medusa {what}, but {number} are stored: {number} are used."
            )


def _vocabulary(source: HeadSource, layout: _Layout) -> tuple[Tensor | None, Tensor | None]:
    """(draft_token_ids, the stored lm_head rows that give them in order); (None, None) for the whole vocabulary."""
    name, vocab = layout.lm_heads[0], source.target.vocab_size
    rows = vocab if name is None else source.shape(name)[0]
    stored = source.stored.get("token_map")
    if stored is None:
        source.check_vocabulary(rows, name or "lm_head")
        return None, None
    ids, order = ascending_map(source, stored.load().flatten())
    if name is None:
        raise CheckpointError(f"{source.path} holds a token_map but no lm_heads to map; export it again.")
    if rows not in (len(ids), vocab):
        raise CheckpointError(
            f"{source.path}: '{name}' has {rows} rows where token_map has {len(ids)} and the target {vocab}; export it again."
        )
    return ids, ids if rows == vocab else order


def _plan(
    source: HeadSource, spec: HeadSpec, layout: _Layout, vocabulary: tuple[Tensor | None, Tensor | None]
) -> NamedTensors:
    plan = TensorPlan(source.stored, source.path)
    hidden, (ids, rows) = spec.hidden_size, vocabulary
    pick = None if rows is None else _rows(rows)
    for i, lm_head in enumerate(layout.lm_heads):
        for j in range(layout.num_blocks):
            name, stored = f"heads.{i}.blocks.{j}", layout.block.format(i=i, j=j)
            plan.add(f"{name}.weight", Part(f"{stored}.weight", (hidden, hidden)))
            if f"{stored}.bias" in source.stored:
                plan.add(f"{name}.bias", Part(f"{stored}.bias", (hidden,)))
            else:
                _add_zero_bias(source, plan, name, stored)
        if lm_head is not None:
            plan.add(f"heads.{i}.lm_head.weight", Part(lm_head, (source.shape(lm_head)[0], hidden), pick))
    if ids is not None:
        plan.add_tensor("draft_token_ids", ids)
    return plan.finish(("token_map",))


def _add_zero_bias(source: HeadSource, plan: TensorPlan, name: str, stored: str) -> None:
    """vLLM's blocks have a bias only with medusa_fc_bias; everywhere else a missing one is damage."""
    if stored.startswith("blocks.") and not source.config.get("medusa_fc_bias", False):
        weight = source.stored[f"{stored}.weight"]
        plan.add_tensor(f"{name}.bias", torch.zeros(weight.shape[0], dtype=weight.dtype))
        return
    raise CheckpointError(f"{source.path} holds no tensor '{stored}.bias'; the head is incomplete.")


def _rows(index: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[index]
