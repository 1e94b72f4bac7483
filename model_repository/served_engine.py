"""What the Triton models need of the engine they serve: where it is, its limits, its tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furcate.builder.errors import EngineMismatch
from furcate.model_repository.staged_tables import STAGES
from furcate.model_repository.tables import POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

_TABLES = {table.name: table for table in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, *STAGES)}


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """An engine directory as a model repository sees it."""

    path: Path
    name: str
    vocab_size: int
    end_ids: tuple[int, ...]

    def tokenizer(self) -> Any:
        """The target's tokenizer (transformers)."""
        return tokenizer_in(self.path / "tokenizer")


def tokenizer_in(directory: Path) -> Any:
    """The tokenizer (transformers) that a directory holds.

    tokenizer.json is the whole tokenizer, and reading it needs no torch: two seconds less for each model.
    """
    if (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def served_engine(model_args: Mapping[str, str]) -> ServedEngine:
    """The engine named by the `engine_dir` parameter of a model's config, a path relative to the repository.

    `model_args` is what Triton hands to `initialize`. Raises EngineMismatch when there is no engine there, or when the config was
    written by another version of furcate.
    """
    config = json.loads(model_args["model_config"])
    _check_config(config)
    parameters = config["parameters"]
    model_dir = Path(model_args["model_repository"])
    path = (model_dir.parent / parameters["engine_dir"]["string_value"]).resolve()
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        return ServedEngine(
            path=path,
            name=manifest["name"],
            vocab_size=manifest["vocab_size"],
            end_ids=tuple(manifest["eos_token_ids"]),
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineMismatch(
            f"No engine can be read at '{path}' ({type(error).__name__}: {error}); move the engine back beside the"
            " repository, or write the repository anew with build_engine."
        ) from None


def _check_config(config: Mapping[str, Any]) -> None:
    """Raises EngineMismatch when a model's inputs and outputs are not those that this code reads and gives."""
    table = _TABLES[config["name"]]
    for kind, fields in (("input", table.inputs), ("output", table.outputs)):
        if {tensor["name"] for tensor in config[kind]} != {field.name for field in fields}:
            raise EngineMismatch(
                f"The repository's model '{table.name}' was written by another version of furcate (its {kind}s differ); write the"
                " repository anew with build_engine."
            )
