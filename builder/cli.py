"""The `build_engine` command: checks, builds, and says what was made."""

import sys

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from furcate.builder.build import BuildResult, build_engine, plan_dry_run
from furcate.builder.build import Progress as BuildProgress
from furcate.builder.config import BuildConfig
from furcate.builder.dry_run import dry_run_report
from furcate.builder.errors import ConfigError, FurcateError
from furcate.builder.scheduling_config import SchedulingConfig, checked_scheduling
from furcate.builder.staging import check_output

DESCRIPTION = """Build a speculative-decoding engine, and the Triton model repository that serves it.

A target is a Hugging Face checkpoint (a directory with config.json and safetensors, or a .gguf file). A head is the trained
draft weights beside it (EAGLE-3, EAGLE-1/2 or Medusa, in any public layout). Without a head the engine decodes plainly.

examples:
  build_engine --target SmolLM2-135M-Instruct --head examples/heads/eagle3 --output engines/smol --repository repository
  build_engine --target model.gguf --head heads/medusa --tree mc_sim_7b_63 --output engines/smol-medusa
  build_engine --target Llama-3.1-8B --head EAGLE3-Llama --tree dynamic:60/7/10 --output engines/llama
  build_engine --target Llama-3.1-8B --head EAGLE3-Llama --output engines/llama --executor tensorrt --gpu h200 --dry-run

afterwards:
  furcate inspect engines/smol
  furcate compare engines/smol --prompts examples/prompts.jsonl
  furcate serve repository"""


def main() -> None:
    """Entry point of `build_engine`. Exits with 0, with 2 on a user's error (one line on stderr), with 130 on Ctrl-C."""
    config = tyro.cli(
        BuildConfig,
        prog="build_engine",
        description=DESCRIPTION,
        config=(tyro.conf.EnumChoicesFromValues, tyro.conf.OmitArgPrefixes),
    )
    console = Console(stderr=True)
    try:
        if config.dry_run:
            Console().print(dry_run_report(plan_dry_run(config)))
        else:
            _build(config, console)
    except FurcateError as error:
        console.print(f"build_engine: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("build_engine: interrupted; nothing was written.", highlight=False)
        sys.exit(130)


def _build(config: BuildConfig, console: Console) -> None:
    # The command joins what the packages keep apart: an engine knows nothing of Triton.
    from furcate.model_repository.generate import write_repository

    if config.repository is None and config.scheduling != SchedulingConfig():
        raise ConfigError("settings of how requests share the engine are the repository's; give --repository too.")
    checked_scheduling(config.scheduling)
    if config.repository is not None:
        check_output(config.repository, may_replace=config.overwrite)
    with _BarProgress(console) as progress:
        result = build_engine(config, progress)
        if config.repository is not None:
            progress.stage("writing model repository")
            write_repository(
                config.repository,
                engine_dir=config.output,
                layout=config.layout,
                max_batch_size=config.max_batch_size,
                scheduling=config.scheduling,
                may_replace=config.overwrite,
            )
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    Console().print(summary(config, result))


class _BarProgress(BuildProgress):
    """Draws each stage as a line with a bar and its time."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> "_BarProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None and sys.exc_info()[0] is None:
            self._finish()
        self._progress.stop()

    def _finish(self) -> None:
        assert self._task is not None
        task = self._progress.tasks[self._task]
        total = task.total if task.total is not None else 1
        self._progress.update(self._task, total=total, completed=total)

    def stage(self, name: str, total: int | None = None) -> None:
        if self._task is not None:
            self._finish()
        self._task = self._progress.add_task(name, total=total)

    def advance(self, amount: int = 1) -> None:
        if self._task is not None:
            self._progress.advance(self._task, amount)


def summary(config: BuildConfig, result: BuildResult) -> Table:
    """What was built, as a person wants to read it."""
    manifest = result.manifest
    per_token = manifest.kv_bytes_per_token()
    drafted = ", ".join(f"{head.kind} from {path}" for head, path in zip(manifest.heads, config.head, strict=True))
    rows = {
        "engine": str(result.path),
        "target": f"{manifest.sources['target']}, {manifest.target.num_layers} layers, hidden {manifest.target.hidden_size}",
        "head": drafted or "none (plain decoding)",
        "tree": f"{manifest.tree}: {manifest.tree.budget} nodes, depth {manifest.tree.max_depth}"
        + (", or fewer where that is faster" if manifest.is_adaptive else ""),
        "acceptance": manifest.acceptance.value + ("" if manifest.acceptance.is_lossless else " (LOSSY)"),
        "dtype": manifest.dtype.value,
        "size": _size(result.num_bytes),
        "K/V per sequence": f"{_size(per_token * manifest.max_context_tokens)} at {manifest.max_context_tokens} tokens",
        "K/V pool": f"{_size(per_token * manifest.max_pool_tokens)}, which a server takes when it loads the engine",
    }
    following = f"furcate compare {result.path} --prompts FILE"
    if config.repository is not None:
        rows["repository"] = f"{config.repository} ({config.layout.value} layout)"
        following = f"furcate serve {config.repository}"
    rows["next"] = following
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _size(num_bytes: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
