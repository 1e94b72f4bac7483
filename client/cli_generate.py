"""`furcate generate`: a prompt in, text streamed to the terminal, a closing line of figures."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from furcate.client.options import Options
from furcate.client.results import Generation
from furcate.client.sync_client import Client


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Generate text on a furcate server and stream it to the terminal.

    The text goes to stdout; tokens, speed, tau (tokens a target pass yielded) and the finish reason go to stderr.

    examples:
      furcate generate "Why is the sky blue?" --chat
      furcate generate "Once upon a time" --max-tokens 64 --temperature 0.8 --top-p 0.95 --seed 7
      furcate generate "1, 2, 3," --stop 9 --url http://127.0.0.1:8000
      furcate generate - < prompt.txt
    """

    prompt: tyro.conf.Positional[str]
    """The prompt; - reads it from stdin."""
    url: str = "grpc://127.0.0.1:8001"
    """The server: grpc://host:port or http://host:port."""
    max_tokens: int = 256
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 is greedy; higher is more varied."""
    top_k: int | None = None
    """Sample from the k likeliest tokens."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability."""
    seed: int | None = None
    """Makes a sampled text repeatable."""
    chat: bool = False
    """Put the prompt into the target's chat template, as a user's message."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    priority: int = 0
    """Requests of a larger one are served first; from -100 to 100."""
    timeout_s: float | None = None
    """The server ends the request when it takes longer than this many seconds, the time in line included."""
    deadline_s: float = 300.0
    """Give up after this many seconds, whatever the server does."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command."""
    config = tyro.cli(GenerateConfig, prog="furcate generate", args=arguments)
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    with (
        Client(config.url, deadline_s=config.deadline_s) as client,
        client.stream(prompt, **_options(config)) as stream,
    ):
        for delta in stream:
            print(delta.text, end="", flush=True)
        print()
        print(closing_line(stream.generation), file=sys.stderr)


def closing_line(generation: Generation) -> str:
    """What an answer cost, on one line."""
    tau = "-" if generation.tau is None else f"{generation.tau:.2f}"
    return (
        f"{generation.num_tokens} tokens in {generation.duration_s:.2f} s, {generation.tokens_per_s:.1f} tokens/s,"
        f" tau {tau}, finish reason: {generation.finish_reason.value}"
    )


def _options(config: GenerateConfig) -> Options:
    options: Options = {"max_tokens": config.max_tokens, "temperature": config.temperature, "chat": config.chat}
    if config.top_k is not None:
        options["top_k"] = config.top_k
    if config.top_p is not None:
        options["top_p"] = config.top_p
    if config.seed is not None:
        options["seed"] = config.seed
    if config.priority:
        options["priority"] = config.priority
    if config.timeout_s is not None:
        options["timeout_s"] = config.timeout_s
    if config.stop:
        options["stop"] = config.stop
    return options
