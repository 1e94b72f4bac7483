"""Head checkpoints of every public layout, in furcate's named-tensor form.

The layout is told by config.json and the stored names; see eagle3.py, eagle.py, medusa.py and hydra.py for each.
"""

import re
from pathlib import Path

from furcate.builder.checkpoints.heads.checkpoint import HeadCheckpoint
from furcate.builder.checkpoints.heads.eagle import read_eagle
from furcate.builder.checkpoints.heads.eagle3 import read_eagle3
from furcate.builder.checkpoints.heads.hydra import read_hydra
from furcate.builder.checkpoints.heads.medusa import read_medusa
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.stored import StoredTensor, read_json, stored_tensors
from furcate.builder.checkpoints.trtllm import is_trtllm
from furcate.builder.checkpoints.trtllm_heads import trtllm_head
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec

__all__ = ["HeadCheckpoint", "read_head"]

_MEDUSA = re.compile(r"\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight")
_MEDUSA_PREFIX = re.compile(r"medusa_heads?\.")


def read_head(path: Path, *, target: DecoderSpec, allows_pickle: bool = False) -> HeadCheckpoint:
    """The head in a directory, checked against the target it is to draft for.

    `allows_pickle` lets .bin and .pt files be read (with torch's weights_only). Raises CheckpointError for anything damaged,
    incomplete, of an unknown layout, or trained for another target.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory with the head's config.json and weights.")
    if is_trtllm(path):
        source = HeadSource(path, *trtllm_head(path), target)
        return read_eagle(source) if "fc.weight" in source.stored else read_medusa(source)
    config = read_json(path / "config.json")
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{path} is quantised; allowed are float32, float16 and bfloat16 heads. Dequantise it first."
        )
    stored = _unwrapped(stored_tensors(path, allows_pickle=allows_pickle))
    source = HeadSource(path, config, stored, target)
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise CheckpointError(f"{path} is a speculators head of type '{kind}'; supported is 'eagle3'.")
    if "speculators_model_type" in config or "d2t" in stored or "layers.0.hidden_norm.weight" in stored:
        return read_eagle3(source)
    if "hydra_head_arch" in config or "hydra_num_heads" in config or any(name.startswith("hydra_") for name in stored):
        return read_hydra(source)
    if any(_MEDUSA.fullmatch(name) for name in stored):
        return read_medusa(source)
    if "fc.weight" in stored and "layers.0.self_attn.q_proj.weight" in stored:
        return read_eagle(source)
    raise CheckpointError(
        f"{path} has no known head layout (its first tensors: {', '.join(sorted(stored)[:3])}); known are Medusa, Hydra, "
        "EAGLE-1/2 and EAGLE-3."
    )


def _unwrapped(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The head's own tensors under plain names: without exporters' prefixes, and without a merged checkpoint's target."""
    merged = {name: tensor for name, tensor in stored.items() if name.startswith("medusa_head.")}
    unwrapped: dict[str, StoredTensor] = {}
    for name, tensor in (merged or stored).items():
        plain = _MEDUSA_PREFIX.sub("", name, count=1).removeprefix("model.")
        if plain.startswith("midlayer."):
            plain = "layers.0." + plain.removeprefix("midlayer.")
        if plain in unwrapped:
            raise CheckpointError(f"{tensor.file} holds '{plain}' twice, under two prefixes; export it again.")
        unwrapped[plain] = tensor
    return unwrapped
