"""`furcate canary`: whether a server really serves, for health checks of containers and for people."""

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from furcate.builder.errors import ConfigError
from furcate.client.canary import CANARY_DEADLINE_S, canary


@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """Ask a server for a few greedy tokens, through all its models.

    Triton says that it is ready even when a model's process is dead, so only an answer tells. Exits with 0 and one line when
    the answer came, with 2 and the reason when not. It waits in line like any request: give a probe time for a full queue.

    examples:
      furcate canary
      furcate canary --url http://127.0.0.1:8000 --deadline-s 10
    """

    url: str = "grpc://127.0.0.1:8001"
    """grpc://host:port or http://host:port."""
    deadline_s: float = CANARY_DEADLINE_S
    """How long the answer may take."""


def run(arguments: Sequence[str]) -> None:
    """Prints how long the answer took; ServerError when there is none."""
    config = tyro.cli(CanaryConfig, prog="furcate canary", args=arguments)
    if config.deadline_s <= 0:
        raise ConfigError(f"--deadline-s is {config.deadline_s:g}; it must be above 0 seconds.")
    generation = canary(config.url, deadline_s=config.deadline_s)
    print(f"ok: {generation.num_tokens} tokens in {generation.duration_s:.2f} s from {config.url}")
