"""The requests a benchmark sends: a mix of prompts, lengths and temperatures, some cancelled, some malformed."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from transformers import AutoTokenizer

from furcate.builder.engine import Engine
from furcate.decoding.prompts import Prompt, encode


class Fate(StrEnum):
    """What is done with a request."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """Left by the client after a few pieces."""
    MALFORMED = "malformed"
    """Asks for something that must be refused."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. Two asks with the same `key` must get the same text."""

    prompt_index: int
    text: str
    options: dict = field(default_factory=dict)
    fate: Fate = Fate.FINISHED
    num_pieces: int = 0
    """Pieces read before the client leaves, for a cancelled one."""

    @property
    def key(self) -> tuple[int, float, int | None]:
        """Prompt, temperature, seed: what decides the text, whatever its length."""
        return self.prompt_index, self.options.get("temperature", 0.0), self.options.get("seed")


MALFORMED = (
    {"max_tokens": -1},
    {"max_tokens": 1_000_000},
    {"temperature": -1.0},
    {"top_p": 5.0},
    {"top_k": -7},
    {"beam_width": 4},
    {"repetition_penalty": -2.0},
    {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{no json"},
)
"""Options of which each must be refused."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares and lengths of a load."""

    max_tokens: tuple[int, ...] = (8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    cancelled: float = 0.0
    malformed: float = 0.0


def asks(prompts: list["ServedPrompt"], mix: Mix, seed: int) -> Iterator[Ask]:
    """Requests without end, the same for the same seed. Sampled ones take their prompt's own seed, so that texts recur."""
    draw = random.Random(seed)
    while True:
        index = draw.randrange(len(prompts))
        options: dict = {"max_tokens": draw.choice(mix.max_tokens), **prompts[index].options}
        temperature = draw.choice(mix.temperatures)
        if temperature:
            options |= {"temperature": temperature, "seed": 1000 + index}
        fate, lot = Fate.FINISHED, draw.random()
        if lot < mix.cancelled:
            fate = Fate.CANCELLED
        elif lot < mix.cancelled + mix.malformed:
            fate = Fate.MALFORMED
            options |= draw.choice(MALFORMED)
        yield Ask(
            prompt_index=index,
            text=prompts[index].text,
            options=options,
            fate=fate,
            num_pieces=draw.randrange(1, 4),
        )


@dataclass(frozen=True, kw_only=True)
class ServedPrompt:
    """A prompt as it is sent, and as the server encodes it."""

    text: str
    encoded: Prompt
    options: dict
    """What makes the server encode it so: in the chat template where the target has one."""


def served_prompts(path: Path, engine: Engine) -> list[ServedPrompt]:
    """The texts of a prompts file (JSON lines with a 'prompt' key)."""
    is_chat = engine.manifest.has_chat_template
    tokenizer = AutoTokenizer.from_pretrained(engine.tokenizer_dir)
    texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]
    return [
        ServedPrompt(
            text=text,
            encoded=Prompt(text, tuple(encode(tokenizer, text, is_chat))),
            options={"chat": True} if is_chat else {},
        )
        for text in texts
    ]


def same_prompts(prompts: list[ServedPrompt], count: int, max_tokens: int) -> list[Ask]:
    """`count` greedy requests of one length."""
    chosen = [(i % len(prompts), prompts[i % len(prompts)]) for i in range(count)]
    return [Ask(prompt_index=i, text=p.text, options={"max_tokens": max_tokens, **p.options}) for i, p in chosen]
