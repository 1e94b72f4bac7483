"""Does `furcate tune` pick well, and does an adaptive budget cost nothing where drafting is in vain? Both as ratios, in one run.

    .venv/bin/python benchmarks/tuning.py ENGINE [--prompts examples/prompts.jsonl] [--rounds 5]

First the engine is tuned (nothing is recorded in it). Then, round after round on prompts that tuning has not seen, the picked tree,
the best chain that tuning measured and plain decoding take turns step by step: the picked one should be as fast as the chain or
faster. Last, texts of random words (temperature 3, which no head predicts) by plain decoding, by the engine's whole tree and
with an adaptive budget: the adaptive one should be within 5% of plain decoding. Writes benchmarks/results/tuning.json.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import tyro
from host import host
from methods import count_cpu_time
from rich.console import Console

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import Engine, read_engine
from furcate.decoding.compare import generate
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.executors.load import load_executor
from furcate.decoding.prompts import Prompt, read_prompts
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.tune import PLAIN, TuneConfig, tune

RANDOM_WORDS = 3.0
"""A temperature at which this model's next word is anybody's guess."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which engine, and how much of it."""

    engine: tyro.conf.Positional[Path]
    prompts: Path = Path("examples/prompts.jsonl")
    limit: int = 3
    """Prompts for tuning, and as many others for the rounds."""
    max_tokens: int = 64
    rounds: int = 5
    temperature: float = 0.0
    """Of the tuning and its rounds."""
    cpu_time: bool = False
    """Count this process's CPU seconds, on one thread, instead of seconds: for a machine that others use too."""
    results: Path = Path("benchmarks/results")


@dataclass(frozen=True, kw_only=True)
class Round:
    """Tokens a second of each contender, in its turn."""

    speeds: dict[str, float]

    def ratio(self, name: str, other: str) -> float:
        """How much faster one was than the other."""
        return self.speeds[name] / self.speeds[other]


def plainly(executor: EngineExecutor) -> Scheduler:
    """Plain decoding."""
    return Scheduler(executor, PLAIN, Acceptance.MATCH)


@dataclass(kw_only=True)
class Contender:
    """One way to decode, on an executor of its own, and what its texts took so far (prompts do not count)."""

    scheduler: Scheduler
    num_tokens: int = 0
    seconds: float = 0.0
    is_done: bool = False

    def begin(self, prompt: Prompt, sampling: SamplingParams) -> None:
        """Takes a prompt on, up to the first token."""
        self.scheduler.add(Request(request_id=0, prompt_ids=prompt.input_ids, sampling=sampling))
        while not self.scheduler.step()[0].stats.num_emitted_tokens:
            pass
        self.is_done = not self.scheduler.sequences

    def step(self) -> None:
        """One step, timed."""
        start = time.perf_counter()
        (output,) = self.scheduler.step()
        self.seconds += time.perf_counter() - start
        self.num_tokens += len(output.token_ids)
        self.is_done = output.finish_reason is not None


def rounds_of(
    engine: Engine,
    scheduler_of: dict[str, Callable[[EngineExecutor], Scheduler]],
    prompts: list[Prompt],
    sampling: Callable[[int, int], SamplingParams],
    num_rounds: int,
) -> list[Round]:
    """Every round's speeds. All decode the same text at the same time, step by step in turns, so that noise hits all alike."""
    schedulers = {name: make(load_executor(engine)) for name, make in scheduler_of.items()}
    for scheduler in schedulers.values():
        generate(scheduler, prompts[0], SamplingParams(max_tokens=6))
    rounds = []
    for number in range(num_rounds):
        contenders = {name: Contender(scheduler=scheduler) for name, scheduler in schedulers.items()}
        for place, prompt in enumerate(prompts):
            for contender in contenders.values():
                contender.begin(prompt, sampling(number, place))
            while running := [contender for contender in contenders.values() if not contender.is_done]:
                min(running, key=lambda contender: contender.num_tokens).step()
        rounds.append(Round(speeds={name: c.num_tokens / c.seconds for name, c in contenders.items()}))
    return rounds


def tuned_rounds(options: Options, engine: Engine) -> dict[str, object]:
    """Tunes, then runs what was picked against the best chain and plain decoding."""
    tuning = tune(
        TuneConfig(
            engine=options.engine,
            prompts=options.prompts,
            limit=options.limit,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            dry_run=True,
        )
    )
    measured = [candidate for candidate in tuning.candidates if candidate.measured_ratio is not None]
    chain = max((c for c in measured if c.family == "chain"), key=lambda c: c.measured_ratio or 0.0)
    scheduler_of: dict[str, Callable[[EngineExecutor], Scheduler]] = {
        "picked": lambda executor: Scheduler(executor, tuning.chosen.tree, Acceptance.MATCH),
        "chain": lambda executor: Scheduler(executor, chain.tree, Acceptance.MATCH),
        "plain": plainly,
    }

    def sampling(number: int, place: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=100 * number + place,
            end_ids=engine.manifest.eos_token_ids,
        )

    prompts = read_prompts(options.prompts, engine)[options.limit : 2 * options.limit]
    rounds = rounds_of(engine, scheduler_of, prompts, sampling, options.rounds)
    return {
        "picked": str(tuning.chosen.tree),
        "chain": str(chain.tree),
        "picked_over_chain_when_tuned": (tuning.chosen.measured_ratio or 1.0) / (chain.measured_ratio or 1.0),
        "picked_over_chain": [entry.ratio("picked", "chain") for entry in rounds],
        "picked_over_plain": [entry.ratio("picked", "plain") for entry in rounds],
        "candidates": [
            {"tree": str(c.tree), "predicted_tau": c.predicted_tau, "measured_tau": c.measured_tau}
            | {"predicted_ratio": c.predicted_ratio, "measured_ratio": c.measured_ratio}
            for c in measured
        ],
    }


def adaptive_rounds(options: Options, engine: Engine) -> dict[str, object]:
    """Random words: plain decoding, the whole tree, and an adaptive budget."""
    tree = engine.manifest.tree
    scheduler_of: dict[str, Callable[[EngineExecutor], Scheduler]] = {
        "plain": plainly,
        "whole": lambda executor: Scheduler(executor, tree, Acceptance.MATCH),
        "adaptive": lambda executor: Scheduler(executor, tree, Acceptance.MATCH, is_adaptive=True),
    }

    def sampling(number: int, place: int) -> SamplingParams:
        return SamplingParams(max_tokens=2 * options.max_tokens, temperature=RANDOM_WORDS, seed=100 * number + place)

    prompts = read_prompts(options.prompts, engine)[:2]
    rounds = rounds_of(engine, scheduler_of, prompts, sampling, options.rounds)
    return {
        "tree": str(tree),
        "adaptive_over_plain": [entry.ratio("adaptive", "plain") for entry in rounds],
        "whole_over_plain": [entry.ratio("whole", "plain") for entry in rounds],
    }


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    console = Console(width=120)
    machine = host()
    if options.cpu_time:
        count_cpu_time()
    engine = read_engine(options.engine)
    shown = {name: value for name, value in asdict(options).items() if not isinstance(value, Path)}
    record: dict[str, object] = {"host": machine, "engine": engine.manifest.name, "options": shown}
    for name, part in (("tuned", tuned_rounds), ("random words", adaptive_rounds)):
        record[name] = found = part(options, engine)
        console.print(name, style="bold")
        for key, value in found.items():
            if isinstance(value, list) and value and isinstance(value[0], float):
                shown = ", ".join(f"{ratio:.3f}" for ratio in value)
                console.print(f"  {key}: {shown}; median {median(value):.3f}", highlight=False)
            elif not isinstance(value, list):
                console.print(f"  {key}: {value}", highlight=False)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "tuning.json").write_text(json.dumps(record, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
