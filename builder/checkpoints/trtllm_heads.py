"""Heads inside TensorRT-LLM checkpoints, under the names of Medusa's and EAGLE's own layouts.

Names as in github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/models/medusa/weight.py and models/eagle/weight.py (load_eagle_hf). An
EAGLE checkpoint repeats its one layer for every draft pass (`eagle_nets.<i>`), each with a copy of the target's lm_head: the
first layer is read, and the target's own lm_head serves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from furcate.builder.checkpoints.stored import StoredTensor, read_json
from furcate.builder.checkpoints.trtllm import hugging_face_config, hugging_face_name, joined, rank_files
from furcate.builder.errors import CheckpointError

_MEDUSA_BLOCK = re.compile(r"medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)")
_MEDUSA_HEAD = re.compile(r"medusa_heads\.(\d+)\.lm_head\.weight")
_EAGLE = "eagle_nets.0.drafter."

Head = tuple[dict[str, Any], dict[str, StoredTensor]]


def trtllm_head(path: Path) -> Head:
    """(config.json of the head's own layout, stored tensors under its names). Raises CheckpointError where there is no head."""
    config = read_json(path / "config.json")
    ranks = rank_files(config, path)
    if any(name.startswith("medusa_heads.") for name in ranks[0]):
        return _medusa(config, ranks)
    if any(name.startswith(_EAGLE) for name in ranks[0]):
        return _eagle(config, ranks, path)
    raise CheckpointError(
        f"{path} is a TensorRT-LLM checkpoint of {config.get('architecture')} without Medusa heads or an EAGLE layer; as --head, "
        "give a MedusaForCausalLM or EagleForCausalLM checkpoint."
    )


def _medusa(config: dict[str, Any], ranks: list[dict[str, StoredTensor]]) -> Head:
    renamed = {}
    for name in ranks[0]:
        pieces = [rank[name] for rank in ranks]
        block, head = _MEDUSA_BLOCK.fullmatch(name), _MEDUSA_HEAD.fullmatch(name)
        if block is not None:
            renamed[f"{block[1]}.{block[2]}.linear.{block[3]}"] = joined(pieces, 0, None)
        if head is not None:
            renamed[f"{head[1]}.{config['num_medusa_layers']}.weight"] = joined(pieces, 0, None)
    heads = {"medusa_num_heads": config["num_medusa_heads"], "medusa_num_layers": config["num_medusa_layers"]}
    return heads, renamed


def _eagle(config: dict[str, Any], ranks: list[dict[str, StoredTensor]], path: Path) -> Head:
    own = config.get("eagle_net_config")
    if not isinstance(own, dict):
        raise CheckpointError(f"{path / 'config.json'} has no eagle_net_config; convert the checkpoint again.")
    own = {"mapping": config.get("mapping"), **own}
    renamed = {}
    for name in ranks[0]:
        if not name.startswith(_EAGLE):
            continue
        plain, pieces = name.removeprefix(_EAGLE), [rank[name] for rank in ranks]
        if plain in ("fc.weight", "fc.bias"):
            renamed[plain] = joined(pieces, 0, None)
        else:
            theirs, axis, sizes = hugging_face_name(f"transformer.{plain}", own)
            renamed[theirs.removeprefix("model.")] = joined(pieces, axis, sizes)
    return hugging_face_config(own), renamed
