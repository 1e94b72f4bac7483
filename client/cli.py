"""The `furcate` command. Each subcommand is imported when it is called, so that help is quick."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from furcate.builder.errors import FurcateError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: `run(arguments)` of a module."""

    module: str
    run: str
    summary: str


COMMANDS = {
    "serve": Command(module="cli_serve", run="run", summary="Serve a model repository with Triton."),
    "generate": Command(
        module="cli_generate", run="run", summary="Generate text on a server, streamed to the terminal."
    ),
    "canary": Command(module="cli_canary", run="run", summary="Ask a server for a few tokens: does it really serve?"),
    "api": Command(module="cli_api", run="run", summary="Serve a model over OpenAI's HTTP interface."),
    "top": Command(module="cli_top", run="run", summary="What a server is doing now, from its metrics."),
    "compare": Command(
        module="cli_engine",
        run="run_compare",
        summary="Plain against speculative decoding of an engine, in one process.",
    ),
    "explain": Command(
        module="cli_engine",
        run="run_explain",
        summary="Each step's tree: what was drafted, accepted, and why the rest fell.",
    ),
    "tune": Command(
        module="cli_engine", run="run_tune", summary="Find the tree that is fastest with an engine on this device."
    ),
    "inspect": Command(module="cli_engine", run="run_inspect", summary="What an engine is, for a person."),
    "example": Command(
        module="cli_engine", run="run_example", summary="Fetch the example model, SmolLM2-135M-Instruct."
    ),
    "kernels": Command(module="cli_engine", run="run_kernels", summary="Report the GPU kernels' compiled budgets."),
}

EXAMPLES = """\
From a checkpoint to a stream of text:
  furcate example --output SmolLM2-135M-Instruct
  build_engine --target SmolLM2-135M-Instruct --head examples/heads/eagle3 --output engines/smol --repository repository
  furcate compare engines/smol --prompts examples/prompts.jsonl
  furcate serve repository
  furcate generate "Why is the sky blue?" --chat"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exits with 0, with 2 on a user's error (one line on stderr), with 130 on Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"furcate: there is no command '{name}'; the commands are: {', '.join(COMMANDS)}.", file=sys.stderr)
        sys.exit(2)
    command = COMMANDS[name]
    try:
        getattr(import_module(f"furcate.client.{command.module}"), command.run)(rest)
    except FurcateError as error:
        print(f"furcate {name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; a last flush into the closed pipe must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def usage() -> str:
    """The text of `furcate --help`."""
    lines = ["usage: furcate COMMAND ...", "", "Tree-structured speculative decoding, served.", "", "commands:"]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", EXAMPLES, "", "Each command explains itself: furcate COMMAND --help"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
