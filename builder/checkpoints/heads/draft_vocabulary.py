"""Draft vocabularies: which target token each draft id stands for, read from `d2t`/`t2d` or `token_map`.

`d2t` holds offsets (target id = i + d2t[i]), `t2d` marks the target tokens that have a draft id, both in ascending order:
nonzero(t2d) == d2t + arange. Example: V = 6, tokens 1, 2 and 5 kept: t2d = [0,1,1,0,0,1], d2t = [1,1,3].
A map longer than the tokens seen in training is padded with zero offsets at its end; those draft ids are dropped.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.errors import CheckpointError


def draft_token_ids(source: HeadSource, draft_size: int) -> Int[Tensor, " draft"] | None:
    """Target ids, ascending, of the draft ids in use; None when the head's vocabulary is the target's.

    Raises CheckpointError for a map that is missing, is not made of offsets, leaves the vocabulary, or disagrees with `t2d`.
    """
    vocab = source.target.vocab_size
    offsets = _integers(source, "d2t")
    if draft_size > vocab:
        raise CheckpointError(
            f"{source.path}: its lm_head has {draft_size} rows, but the target has {vocab} tokens; give the head "
            "trained for this target."
        )
    if draft_size == vocab:
        if offsets is not None and bool(offsets.any()):
            raise CheckpointError(
                f"{source.path}: its lm_head covers the whole vocabulary ({vocab}), yet d2t is not all zeros; export it again."
            )
        return None
    if offsets is None:
        raise CheckpointError(
            f"{source.path} drafts {draft_size} of {vocab} tokens but holds no d2t map; export it again with its map."
        )
    if offsets.shape != (draft_size,):
        raise CheckpointError(
            f"{source.path}: d2t is {list(offsets.shape)} where its lm_head has {draft_size} rows; export it again."
        )
    return _checked(source, _used_ids(source, offsets))


def ascending_map(source: HeadSource, token_map: Tensor) -> tuple[Int[Tensor, " draft"], Int[Tensor, " draft"]]:
    """(target ids ascending, their old positions) of a map that holds target ids in any order (vLLM's `token_map`)."""
    vocab = source.target.vocab_size
    ids, order = torch.sort(token_map.to(torch.int64))
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise CheckpointError(
            f"{source.path}: token_map names token {int(ids[0] if ids[0] < 0 else ids[-1])}, outside the target's {vocab}."
        )
    if bool((ids[1:] == ids[:-1]).any()):
        raise CheckpointError(f"{source.path}: token_map names a token twice; export it again.")
    return ids, order


def _integers(source: HeadSource, name: str) -> Tensor | None:
    stored = source.stored.get(name)
    if stored is None:
        return None
    if stored.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(f"{stored.file}: '{name}' is {stored.dtype}; it must be int64 or int32.")
    return stored.load().to(torch.int64)


def _used_ids(source: HeadSource, offsets: Tensor) -> Tensor:
    """i + offset for the draft ids in use: the rows before the padding, if there is any."""
    ids = offsets + torch.arange(len(offsets))
    steps_back = torch.nonzero(ids[1:] <= ids[:-1])
    end = int(steps_back[0]) + 1 if len(steps_back) > 0 else len(ids)
    if bool(offsets[end:].any()):
        raise CheckpointError(
            f"{source.path}: d2t is not in ascending order at draft id {end} (target ids {int(ids[end - 1])}, {int(ids[end])}); "
            "export it again."
        )
    _refuse_ids(source, offsets[:end])
    return ids[:end]


def _refuse_ids(source: HeadSource, offsets: Tensor) -> None:
    """Offsets repeat wherever neighbouring tokens are kept; target ids never repeat. Where that could be chance, t2d decides."""
    if len(offsets) < 2 or int(offsets[0]) < 0 or not bool((offsets[1:] > offsets[:-1]).all()):
        return
    marked = _marked(source)
    if marked is None or torch.equal(marked, offsets):
        raise CheckpointError(
            f"{source.path}: d2t looks like target ids, where offsets (target id - draft id) are expected; subtract "
            "arange(len(d2t)) from it once, or store t2d if these are offsets."
        )


def _checked(source: HeadSource, ids: Tensor) -> Tensor:
    vocab = source.target.vocab_size
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside) > 0:
        raise CheckpointError(
            f"{source.path}: d2t leads to token {int(outside[0])}, outside the target's {vocab} tokens; export it again."
        )
    marked = _marked(source)
    if marked is not None and not torch.equal(marked, ids):
        raise CheckpointError(
            f"{source.path}: t2d marks {len(marked)} tokens, d2t leads to {len(ids)}, and they are not the same tokens; "
            "export both from one mapping."
        )
    return ids


def _marked(source: HeadSource) -> Tensor | None:
    """The target tokens that t2d marks; None when there is no t2d."""
    marks = source.stored.get("t2d")
    if marks is None:
        return None
    source.check_vocabulary(marks.shape[0], "t2d")
    return torch.nonzero(marks.load().to(torch.bool)).flatten()
