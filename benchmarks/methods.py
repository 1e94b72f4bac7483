"""Every method side by side on the example model: tau, target steps, and speed over plain decoding, in one run.

    .venv/bin/python benchmarks/methods.py SmolLM2-135M-Instruct [--engines engines/methods]

SmolLM2-135M-Instruct is the directory that `furcate example` writes. Engines that are not there yet are built (bfloat16). Every
method continues the same prompts at temperature 0 and 1, one at a time and eight together; a speed is a ratio to plain decoding
in the same setting, right before and right after it. Prints docs/methods.md's figures, and writes benchmarks/results/methods.json.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from host import BUSY, host
from rich.console import Console
from rich.table import Table

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig
from furcate.builder.engine import read_engine
from furcate.builder.merged_tree_config import parse_trees
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.prompts import Prompt, read_prompts
from furcate.decoding.request import Request, RequestStats, SamplingParams
from furcate.decoding.scheduler import Scheduler

HEADS = Path(__file__).parents[1] / "examples" / "heads"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table. `head` is an example head, or "self": the target as its own draft model; or several, joined by +."""

    name: str
    head: str
    tree: str
    acceptance: str = "match"
    is_adaptive: bool = False

    @property
    def is_sampled_only(self) -> bool:
        """True when at temperature 0 it is another row: greedy decoding knows one rule."""
        return self.acceptance != "match"


METHODS = (
    Method(name="draft model, chain", head="self", tree="chain:3"),
    Method(name="draft model, p/q", head="self", tree="chain:3", acceptance="multi_step"),
    Method(name="Medusa static", head="medusa", tree="mc_sim_7b_63"),
    Method(name="Medusa product", head="medusa", tree="cartesian:4,3,2/16"),
    Method(name="Medusa typical (lossy)", head="medusa", tree="mc_sim_7b_63", acceptance="typical"),
    Method(name="EAGLE-1 chain", head="eagle", tree="chain:4"),
    Method(name="EAGLE-1 static", head="eagle", tree="eagle_mc_sim_7b_63"),
    Method(name="EAGLE-2", head="eagle", tree="dynamic:16/4/4"),
    Method(name="EAGLE-3 chain", head="eagle3", tree="chain:4"),
    Method(name="EAGLE-3 chain, p/q", head="eagle3", tree="chain:4", acceptance="multi_step"),
    Method(name="EAGLE-3 chain, block", head="eagle3", tree="chain:4", acceptance="block"),
    Method(name="EAGLE-3", head="eagle3", tree="dynamic:16/4/4"),
    Method(name="EAGLE-3, adaptive budget", head="eagle3", tree="dynamic:16/4/4", is_adaptive=True),
    Method(name="EAGLE-3, UniVer", head="eagle3", tree="dynamic:16/4/4", acceptance="univer"),
    Method(name="SpecInfer", head="eagle3", tree="expansion:1,1,3,1,1", acceptance="multi_step"),
    Method(name="recursive rejection", head="eagle3", tree="expansion:3,2,1", acceptance="recursive"),
    Method(name="traversal", head="eagle3", tree="expansion:3,2,1", acceptance="traversal"),
    Method(name="SpecInfer, two heads merged", head="eagle3+medusa", tree="dynamic:10/3/3+dynamic:8/2/3"),
    Method(
        name="SpecInfer, two heads merged, p/q",
        head="eagle3+medusa",
        tree="expansion:2,1,1+expansion:2,1",
        acceptance="multi_step",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one method gave in one setting."""

    method: Method
    temperature: float
    batch: int
    tau: float
    target_steps: int
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the model and the engines are."""

    target: tyro.conf.Positional[Path]
    engines: Path = Path("engines/methods")
    prompts: Path = Path("examples/prompts.jsonl")
    max_tokens: int = 32
    limit: int = 4
    """Prompts of a setting, or as many as it decodes together."""
    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    only: tuple[str, ...] = ()
    """Names of the rows to run; all by default."""
    cpu_time: bool = False
    """Count this process's CPU seconds, on one thread, instead of seconds: for a machine that others use too."""
    name: str = "methods"
    """The JSON file's name."""
    results: Path = Path("benchmarks/results")


def executor_of(options: Options, head: str) -> TorchExecutor:
    """The example model with this head, built when it is not there yet."""
    output = options.engines / head
    if not output.exists():
        sources = tuple(options.target if name == "self" else HEADS / name for name in head.split("+"))
        build_engine(BuildConfig(target=options.target, head=sources, output=output))
    return TorchExecutor(read_engine(output))


def run(scheduler: Scheduler, prompts: list[Prompt], batch: int, sampling: dict) -> tuple[list[RequestStats], float]:
    """Every prompt's counts, and the seconds of all steps after the prompts."""
    stats, seconds = {}, 0.0
    for start in range(0, len(prompts), batch):
        for number, prompt in enumerate(prompts[start : start + batch], start):
            params = SamplingParams(seed=number, **sampling)
            scheduler.add(Request(request_id=number, prompt_ids=prompt.input_ids, sampling=params))
        while not all(sequence.is_prefilled for sequence in scheduler.sequences.values()):
            stats |= {output.request_id: output.stats for output in scheduler.step()}
        begin = time.perf_counter()
        while scheduler.sequences:
            stats |= {output.request_id: output.stats for output in scheduler.step()}
        seconds += time.perf_counter() - begin
    return [stats[number] for number in sorted(stats)], seconds


def tokens_a_second(run_of: tuple[list[RequestStats], float]) -> float:
    stats, seconds = run_of
    return sum(entry.num_emitted_tokens - 1 for entry in stats) / seconds


def compare_methods(options: Options) -> Iterator[Figures]:
    """The figures of every method in every setting, head by head."""
    chosen = [method for method in METHODS if not options.only or method.name in options.only]
    for head in dict.fromkeys(method.head for method in chosen):
        executor = executor_of(options, head)
        manifest = executor.manifest
        prompts = read_prompts(options.prompts, read_engine(options.engines / head))
        plain = Scheduler(executor, parse_tree("single", None), Acceptance.MATCH)
        for batch in options.batches:
            texts = prompts[: max(options.limit, batch)]
            for temperature in options.temperatures:
                sampling = {
                    "max_tokens": options.max_tokens,
                    "temperature": temperature,
                    "end_ids": manifest.eos_token_ids,
                }
                methods = [m for m in chosen if m.head == head and not (temperature == 0 and m.is_sampled_only)]
                run(plain, texts[:batch], batch, {**sampling, "max_tokens": 4})
                before = tokens_a_second(run(plain, texts, batch, sampling))
                for method in methods:
                    tree = parse_trees(method.tree, manifest.heads)
                    acceptance = Acceptance(method.acceptance)
                    scheduler = Scheduler(executor, tree, acceptance, is_adaptive=method.is_adaptive)
                    run(scheduler, texts[:batch], batch, {**sampling, "max_tokens": 4})
                    done = run(scheduler, texts, batch, sampling)
                    after = tokens_a_second(run(plain, texts, batch, sampling))
                    yield figures_of(method, (temperature, batch), done, (before + after) / 2)
                    before = after


def figures_of(
    method: Method, setting: tuple[float, int], done: tuple[list[RequestStats], float], plain_speed: float
) -> Figures:
    steps = sum(entry.num_target_steps for entry in done[0])
    tokens = sum(entry.num_emitted_tokens - 1 for entry in done[0])
    temperature, batch = setting
    return Figures(
        method=method,
        temperature=temperature,
        batch=batch,
        tau=tokens / max(steps, 1),
        target_steps=steps,
        ratio=tokens_a_second(done) / plain_speed,
    )


def table_of(figures: list[Figures]) -> Table:
    """Methods down, settings across."""
    settings = list(dict.fromkeys((entry.temperature, entry.batch) for entry in figures))
    table = Table(box=None)
    for title in ("method", "tree", "acceptance", *(f"T={t:g} b{b}: tau, steps, speed" for t, b in sorted(settings))):
        table.add_column(title, overflow="fold")
    for method in dict.fromkeys(entry.method for entry in figures):
        cells = []
        for setting in sorted(settings):
            found = [e for e in figures if e.method == method and (e.temperature, e.batch) == setting]
            cells.append(f"{found[0].tau:.2f} {found[0].target_steps} {found[0].ratio:.2f}x" if found else "")
        table.add_row(method.name, method.tree, method.acceptance, *cells)
    return table


def count_cpu_time() -> None:
    """Makes every clock of this process count its own CPU seconds, on the one thread that it then has."""
    torch.set_num_threads(1)
    time.perf_counter = time.process_time


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    machine = host()
    if options.cpu_time:
        count_cpu_time()
    figures = list(compare_methods(options))
    console = Console(width=150)
    console.print(table_of(figures), highlight=False)
    if machine["busy_before"] > BUSY and not options.cpu_time:
        console.print("Other programs were running before this began, so the speeds say little.")
    options.results.mkdir(parents=True, exist_ok=True)
    settings = {"cpu_time": options.cpu_time, "limit": options.limit, "max_tokens": options.max_tokens}
    record = {"host": machine, **settings, "figures": [asdict(entry) for entry in figures]}
    (options.results / f"{options.name}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
