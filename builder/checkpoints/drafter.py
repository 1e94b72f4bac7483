"""What drafts for a target: a head, or a whole model (Hugging Face directory, GGUF file, furcate engine) of its vocabulary."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer

from furcate.builder.checkpoints.gguf import gguf_tokenizer, is_gguf
from furcate.builder.checkpoints.heads import HeadCheckpoint, read_head
from furcate.builder.checkpoints.stored import stored_tensors
from furcate.builder.checkpoints.target import TargetCheckpoint, read_target
from furcate.builder.engine import MANIFEST_FILE, read_engine
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec, HeadKind, HeadSpec

_WHOLE_MODEL = "model.layers.0.input_layernorm.weight"


def read_drafter(path: Path, *, target: TargetCheckpoint, allows_pickle: bool = False) -> HeadCheckpoint:
    """The head or the whole draft model at `path`. Raises CheckpointError for one that does not fit the target."""
    if is_draft_model(path, allows_pickle=allows_pickle):
        return read_draft_model(path, target=target, allows_pickle=allows_pickle)
    return read_head(path, target=target.spec, allows_pickle=allows_pickle)


def is_draft_model(path: Path, *, allows_pickle: bool = False) -> bool:
    """True when `path` holds a whole model rather than a head beside one."""
    if is_gguf(path) or (path / MANIFEST_FILE).is_file():
        return True
    if not (path / "config.json").is_file():
        return False
    names = stored_tensors(path, allows_pickle=allows_pickle)
    return _WHOLE_MODEL in names and "model.norm.weight" in names and not any(map(_is_of_a_head, names))


def _is_of_a_head(name: str) -> bool:
    return name.startswith(("medusa_head.", "hydra_")) or name.removeprefix("model.").startswith("fc.")


def read_draft_model(path: Path, *, target: TargetCheckpoint, allows_pickle: bool = False) -> HeadCheckpoint:
    """The draft model at `path` as a head of kind `model`.

    Raises CheckpointError unless it reads the very tokens that the target writes.
    """
    spec, weights, vocabulary = _read(path, allows_pickle)
    if spec.vocab_size != target.spec.vocab_size:
        raise CheckpointError(
            f"the draft model {path} has a vocabulary of {spec.vocab_size} and the target one of {target.spec.vocab_size}; "
            "a draft model must share the target's tokenizer."
        )
    warnings = ()
    own = _target_vocabulary(target)
    if vocabulary is None or own is None:
        warnings = (
            f"{path} has no tokenizer to compare with the target's; only the vocabularies' sizes were checked.",
        )
    elif vocabulary != own:
        example = next(token for token, i in own.items() if vocabulary.get(token) != i)
        raise CheckpointError(
            f"the draft model {path} has another tokenizer than the target (token {example!r} is not {own[example]} there); "
            "a draft model must share the target's tokenizer."
        )
    head = HeadSpec(
        kind=HeadKind.MODEL,
        hidden_size=spec.hidden_size,
        target_hidden_size=target.spec.hidden_size,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.vocab_size,
        feature_layers=(),
        decoder=spec,
        owns_embedding=True,
        owns_lm_head=True,
    )
    return HeadCheckpoint(head, weights, warnings, path)


def _read(path: Path, allows_pickle: bool) -> tuple[DecoderSpec, Mapping[str, Tensor], dict[str, int] | None]:
    """The model's spec, weights and tokens."""
    if (path / MANIFEST_FILE).is_file():
        engine = read_engine(path)
        return engine.manifest.target, engine.weights("target"), _vocabulary(engine.tokenizer_dir)
    model = read_target(path, allows_pickle=allows_pickle)
    return model.spec, model.weights, _target_vocabulary(model)


def _target_vocabulary(model: TargetCheckpoint) -> dict[str, int] | None:
    if model.source.is_file():
        return gguf_tokenizer(model.source).get_vocab()
    return None if model.tokenizer_dir is None else _vocabulary(model.tokenizer_dir)


def _vocabulary(directory: Path) -> dict[str, int]:
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False).get_vocab()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the tokenizer in {directory} cannot be read: {error}.") from error
