"""Reads a file of prompts: JSON lines with `input_ids` or `prompt`, or plain text, one prompt a line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from furcate.builder.engine import Engine
from furcate.builder.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, and its token ids as the target reads them."""

    text: str
    input_ids: tuple[int, ...]


def read_prompts(path: Path, engine: Engine) -> list[Prompt]:
    """The prompts of a file. Text is put in the target's chat template where it has one; `input_ids` are taken as they are.

    Raises ConfigError naming the file and line that cannot be read.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read: {error}.") from error
    tokenizer = AutoTokenizer.from_pretrained(engine.tokenizer_dir, trust_remote_code=False)
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record: dict[str, Any] = {"prompt": line}
        if path.suffix == ".jsonl":
            record = _record(line, path, number)
        ids = record.get("input_ids")
        if ids is None:
            ids = encode(tokenizer, record["prompt"], engine.manifest.has_chat_template)
        prompts.append(Prompt(record.get("prompt", ""), tuple(ids)))
    if not prompts:
        raise ConfigError(f"prompts file {path} holds no prompts; write one a line, or JSON lines with a 'prompt' key.")
    return prompts


def encode(tokenizer, text: str, is_chat: bool) -> list[int]:
    """Token ids of a user's text, in the chat template or bare."""
    if not is_chat:
        return tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def _record(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"prompts file {path}, line {number} is not JSON: {error}.") from error
    if not isinstance(record, dict) or not ({"prompt", "input_ids"} & record.keys()):
        raise ConfigError(f"prompts file {path}, line {number} needs a 'prompt' or an 'input_ids' key.")
    return record
