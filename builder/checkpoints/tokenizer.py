"""The target's tokenizer, saved beside the engine's weights."""

from pathlib import Path

from transformers import AutoTokenizer

from furcate.builder.checkpoints.gguf import gguf_tokenizer
from furcate.builder.checkpoints.target import TargetCheckpoint
from furcate.builder.errors import CheckpointError


def save_tokenizer(target: TargetCheckpoint, output: Path) -> bool:
    """True when the tokenizer has a chat template. Writes tokenizer and template to `output`.

    Raises CheckpointError when the checkpoint has no tokenizer or it does not fit the vocabulary, OSError when `output` cannot
    be written.
    """
    if target.source.is_file():
        tokenizer = gguf_tokenizer(target.source)
    elif target.tokenizer_dir is None:
        raise CheckpointError(f"{target.source} has no tokenizer; put its tokenizer.json beside config.json.")
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(target.tokenizer_dir, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the tokenizer in {target.tokenizer_dir} cannot be read: {error}.") from error
    if len(tokenizer) > target.spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {target.source} has {len(tokenizer)} tokens and the target's vocabulary {target.spec.vocab_size}; "
            "use the tokenizer the target was trained with."
        )
    try:
        tokenizer.save_pretrained(output)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions for what the system refuses
        raise OSError(str(error)) from error
    return tokenizer.chat_template is not None
