"""The commands that work without a server: inspect, compare, explain, example, kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Print what an engine is: target, head, tree, limits, sizes.

    Example: furcate inspect engines/smol
    """

    engine: tyro.conf.Positional[Path]
    """Engine directory."""


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """Fetch the example model, SmolLM2-135M-Instruct (about 93 MB, once), and save it as a Hugging Face directory.

    Example: furcate example --output SmolLM2-135M-Instruct
    """

    output: Path
    """Directory to write; at once when the model is there already."""
    cache_dir: Path | None = None
    """Where the download is kept; default ~/.cache/furcate."""


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Compile every GPU kernel, print its resources and what the static model expects of it. No GPU is needed.

    Example: furcate kernels --arch 90
    """

    arch: tuple[int, ...] = ()
    """Compute capabilities (90, 100, 120, ...); default all that the kernels are made for."""


def run_inspect(arguments: Sequence[str]) -> None:
    """Runs `furcate inspect`."""
    config = tyro.cli(InspectConfig, prog="furcate inspect", args=arguments)
    from furcate.builder.inspect import print_engine

    print_engine(config.engine)


def run_compare(arguments: Sequence[str]) -> None:
    """Runs `furcate compare`."""
    from furcate.decoding.compare import CompareConfig, compare

    compare(tyro.cli(CompareConfig, prog="furcate compare", args=arguments))


def run_explain(arguments: Sequence[str]) -> None:
    """Runs `furcate explain`."""
    from furcate.decoding.explain import ExplainConfig, explain

    explain(tyro.cli(ExplainConfig, prog="furcate explain", args=arguments))


def run_tune(arguments: Sequence[str]) -> None:
    """Runs `furcate tune`."""
    from furcate.decoding.tune import TuneConfig, tune
    from furcate.decoding.tune_report import draw_curves, print_predictions, print_tuning

    config = tyro.cli(TuneConfig, prog="furcate tune", args=arguments)
    tuning = tune(config, print_predictions)
    print_tuning(tuning)
    plot = config.plot or config.engine / "tuning.png"
    draw_curves(tuning, plot)
    print(f"curves: {plot}" + ("" if config.dry_run else f"; {config.engine} now drafts {tuning.chosen.tree}"))


def run_example(arguments: Sequence[str]) -> None:
    """Runs `furcate example`."""
    config = tyro.cli(ExampleConfig, prog="furcate example", args=arguments)
    from furcate.builder.example import extract_example_model

    path = extract_example_model(config.output, config.cache_dir, progress=lambda line: print(line, flush=True))
    print(f"The example model is in {path}.")


def run_kernels(arguments: Sequence[str]) -> None:
    """Runs `furcate kernels`."""
    config = tyro.cli(KernelsConfig, prog="furcate kernels", args=arguments)
    from furcate.plugins.report import print_kernels

    print_kernels(config.arch or None)
