"""A GGUF file as a Hugging Face model, dequantised by transformers.

The whole model is held in memory in float32: a dequantised weight is scale * quant + minimum with 16-bit scales, which
bfloat16's 8 bits would round and float32 holds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from furcate.builder.checkpoints.stored import StoredTensor, refuse_missing_or_pointer
from furcate.builder.errors import CheckpointError

_MAGIC = b"GGUF"
_Loaded = TypeVar("_Loaded")


def is_gguf(path: Path) -> bool:
    """True when `path` is named, or starts, like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return path.suffix == ".gguf" or stream.read(len(_MAGIC)) == _MAGIC


def gguf_model(path: Path) -> PreTrainedModel:
    """The causal language model in a GGUF file, dequantised, float32. Raises CheckpointError when it cannot be read."""
    refuse_missing_or_pointer(path)
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
    return _from_gguf(
        path,
        lambda: AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            trust_remote_code=False,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        ),
    )


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, with its chat template. Raises CheckpointError when it cannot be read."""
    return _from_gguf(
        path, lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    )


def gguf_tensors(model: PreTrainedModel, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a model from `gguf_model`, under transformers' names."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {
        name: StoredTensor(tuple(tensor.shape), tensor.dtype, path, lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }


def _from_gguf(path: Path, load: Callable[[], _Loaded]) -> _Loaded:
    try:
        return load()
    # transformers and gguf raise whatever their parsing hits (ValueError, KeyError, IndexError, struct.error, ...).
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} could not be read as GGUF: {reason}") from error
