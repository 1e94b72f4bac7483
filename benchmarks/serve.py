"""A served engine under load, on this machine: speed against concurrency, cost of serving, a long soak with its checks.

    .venv/bin/python benchmarks/serve.py throughput ENGINE REPOSITORY [--target HF_DIR]   # closed loop; with transformers beside it
    .venv/bin/python benchmarks/serve.py arrivals   ENGINE REPOSITORY                     # open loop, requests a second
    .venv/bin/python benchmarks/serve.py overhead   ENGINE REPOSITORY                     # a served step over the step itself
    .venv/bin/python benchmarks/serve.py soak       ENGINE REPOSITORY [--minutes 10]      # cancels, malformed requests, memory

ENGINE and REPOSITORY are what build_engine wrote. Each starts its own server on free ports of the loopback address, prints a table
and writes JSON (and PNG) under benchmarks/results. An idle machine is needed for figures, not for the soak's checks.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from host import check_fixed_budget, host
from serving.checks import faults_of, gauges, plain_texts
from serving.figures import Figures, figures_of, plain_figures, table_of
from serving.load import Outcome, closed_loop, open_loop, send
from serving.memory import ALL, MemorySample, mean_resident, sample_memory, slope_of
from serving.requests import Ask, Mix, ServedPrompt, asks, same_prompts, served_prompts

from furcate.builder.engine import read_engine
from furcate.client import AsyncClient
from furcate.client.server import ServerConfig, TritonServer
from furcate.decoding.compare import generate
from furcate.decoding.executors.torch import TORCH_DTYPES, TorchExecutor
from furcate.decoding.request import SamplingParams
from furcate.decoding.scheduler import Scheduler

console = Console(width=130)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What every benchmark here needs."""

    engine: tyro.conf.Positional[Path]
    repository: tyro.conf.Positional[Path]
    prompts: Path = Path("examples/prompts.jsonl")
    limit: int | None = None
    """Use only the first prompts."""
    results: Path = Path("benchmarks/results")
    deadline_s: float = 600.0

    def read_prompts(self) -> list[ServedPrompt]:
        """The prompts, as the server encodes them."""
        return served_prompts(self.prompts, read_engine(self.engine))[: self.limit]

    def server(self) -> TritonServer:
        """A server of the repository on free ports."""
        return TritonServer(
            ServerConfig(repository=self.repository, http_port="auto", grpc_port="auto", metrics_port="auto")
        )

    def write(self, name: str, machine: dict[str, object], record: dict[str, object]) -> None:
        """Saves figures, and the machine as it was before they were taken, as JSON."""
        self.results.mkdir(parents=True, exist_ok=True)
        (self.results / f"{name}.json").write_text(json.dumps({"host": machine, **record}, indent=2) + "\n")
        console.print(f"written: {self.results / name}.json")


@dataclass(frozen=True, kw_only=True)
class Throughput(Served):
    """Greedy requests, so many at once: tokens/s, times to the first and between tokens, tau; PNG."""

    levels: tuple[int, ...] = (1, 4, 16, 32)
    max_tokens: int = 48
    requests_per_stream: int = 2
    target: Path | None = None
    """The Hugging Face directory: transformers' `generate_batch` takes the same loads in the same run."""


@dataclass(frozen=True, kw_only=True)
class Arrivals(Served):
    """A mix of requests at random times, so many a second, whether the server keeps up or not; PNG."""

    rates: tuple[float, ...] = (0.25, 0.5, 1.0)
    count: int = 20


@dataclass(frozen=True, kw_only=True)
class Overhead(Served):
    """One greedy stream on the server and the same request in this process, in turns: the medians of ms a step, and their ratio.
    For an engine built with --no-adaptive."""

    max_tokens: int = 64
    rounds: int = 6


@dataclass(frozen=True, kw_only=True)
class Soak(Served):
    """Mixed requests, some cancelled, some malformed, all levels round after round; every text is held against plain decoding."""

    minutes: float = 10.0
    levels: tuple[int, ...] = (1, 8, 32, 100)
    rounds: int = 5
    """Equal ones, so that their memory compares: the slope is that of a line through their means."""
    warm_up_minutes: float = 4.0
    """Of all levels before the rounds: it fills pages and allocators. Memory must be flat after it."""
    cancelled: float = 0.10
    malformed: float = 0.05


def throughput(options: Throughput) -> None:
    """Levels of concurrency, furcate and transformers in turns."""
    from serving.plots import draw_levels

    machine = host()
    prompts, manifest = options.read_prompts(), read_engine(options.engine).manifest
    peer = None
    if options.target is not None:
        from serving.peers import ContinuousBatching

        peer = ContinuousBatching(options.target, TORCH_DTYPES[manifest.dtype], manifest.eos_token_ids)
        peer.tokens_per_second([prompts[0].encoded], 4)
    rows: list[tuple[str, Figures]] = []
    with options.server() as server:

        async def level(concurrency: int) -> list[Outcome]:
            async with AsyncClient(server.grpc_url, deadline_s=options.deadline_s) as client:
                count = concurrency * options.requests_per_stream
                requests = iter(same_prompts(prompts, count, options.max_tokens))
                return await closed_loop(client, requests, concurrency, count=count)

        asyncio.run(level(1))
        for concurrency in options.levels:
            rows.append(("furcate", figures_of(asyncio.run(level(concurrency)), concurrency)))
            if peer is not None:
                batch = same_prompts(prompts, concurrency, options.max_tokens)
                speed = peer.tokens_per_second([prompts[ask.prompt_index].encoded for ask in batch], options.max_tokens)
                rows.append(("transformers", plain_figures(concurrency, len(batch), speed)))
                console.print(f"{concurrency:>3} at once: {rows[-2][1].tokens_per_s / speed:.2f}x transformers")
    console.print(table_of(rows, "at once"))
    name = f"serve-throughput-{manifest.dtype.value}"
    options.write(name, machine, {"figures": [{"system": system, **asdict(f)} for system, f in rows]})
    curves = {system: [f for s, f in rows if s == system] for system, _ in rows}
    title = f"{manifest.name}, {manifest.dtype.value}, {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s)"
    draw_levels(curves, options.results / f"{name}.png", title=title, level_name="requests at once")


def arrivals(options: Arrivals) -> None:
    """Open loop: rates of arrival."""
    from serving.plots import draw_levels

    machine = host()
    prompts = options.read_prompts()
    rows: list[tuple[str, Figures]] = []
    with options.server() as server:

        async def level(rate: float) -> list[Outcome]:
            async with AsyncClient(server.grpc_url, deadline_s=options.deadline_s) as client:
                return await open_loop(client, asks(prompts, Mix(), seed=0), rate, count=options.count)

        asyncio.run(level(10.0))
        rows += [("furcate", figures_of(asyncio.run(level(rate)), rate)) for rate in options.rates]
    console.print(table_of(rows, "a second"))
    options.write("serve-arrivals", machine, {"figures": [asdict(f) for _, f in rows]})
    draw_levels(
        {"furcate": [f for _, f in rows]},
        options.results / "serve-arrivals.png",
        title=f"{read_engine(options.engine).manifest.name}: requests at random times",
        level_name="requests a second",
    )


def overhead(options: Overhead) -> None:
    """A served step over the step in this process, in turns."""
    machine = host()
    engine = read_engine(options.engine)
    check_fixed_budget(engine)
    prompts = options.read_prompts()[: options.rounds]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    scheduler = Scheduler(TorchExecutor(engine))
    sampling = SamplingParams(max_tokens=options.max_tokens)
    served, direct = [], []
    with options.server() as server:

        async def once(prompt: ServedPrompt) -> float:
            async with AsyncClient(server.grpc_url, deadline_s=options.deadline_s) as client:
                ask = Ask(
                    prompt_index=0,
                    text=prompt.text,
                    options={"max_tokens": options.max_tokens, "end_id": -1, **prompt.options},
                )
                outcome = await send(client, ask)
                assert outcome.generation is not None, outcome.failure or outcome.refusal
                seconds = outcome.piece_times_s[-1] - outcome.piece_times_s[0]
                return 1e3 * seconds / outcome.generation.stats.num_target_steps

        for prompt in [prompts[0], *prompts]:
            served.append(asyncio.run(once(prompt)))
            run = generate(scheduler, prompt.encoded, sampling)
            direct.append(1e3 * run.decode_seconds / run.stats.num_target_steps)
    ratios = [a / b for a, b in zip(served[1:], direct[1:], strict=True)]
    record = {
        "served_ms": statistics.median(served[1:]),
        "direct_ms": statistics.median(direct[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
    console.print(
        f"ms a step, medians of {len(ratios)}: served {record['served_ms']:.2f}, in this process {record['direct_ms']:.2f};"
        f" ratio {record['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    options.write(f"serve-overhead-{engine.manifest.dtype.value}", machine, record)


def soak(options: Soak) -> None:
    """The load, then every check; exits 1 when one fails."""
    from serving.plots import draw_memory

    machine = host()
    prompts = options.read_prompts()
    mix = Mix(cancelled=options.cancelled, malformed=options.malformed)
    outcomes: list[Outcome] = []
    memory: list[MemorySample] = []
    manifest = read_engine(options.engine).manifest
    with options.server() as server:

        async def level(concurrency: int, seed: int, seconds: float) -> None:
            async with AsyncClient(server.grpc_url, deadline_s=options.deadline_s) as client:
                watch = asyncio.create_task(watch_memory())
                outcomes.extend(await closed_loop(client, asks(prompts, mix, seed), concurrency, duration_s=seconds))
                watch.cancel()
            console.print(f"{concurrency} at once: {len(outcomes)} requests so far, {memory[-1].total:.0f} MiB")

        async def watch_memory() -> None:
            while True:
                memory.append(await asyncio.to_thread(sample_memory, server, manifest))
                await asyncio.sleep(2)

        def round_of_levels(number: int, minutes: float) -> list[MemorySample]:
            before = len(memory)
            for place, concurrency in enumerate(options.levels):
                seed = number * len(options.levels) + place
                asyncio.run(level(concurrency, seed, 60 * minutes / len(options.levels)))
            return memory[before:]

        round_of_levels(0, options.warm_up_minutes)
        settled_s = time.monotonic()
        rounds = [round_of_levels(1 + number, options.minutes / options.rounds) for number in range(options.rounds)]
        time.sleep(2)
        left = gauges(server)
    console.print("holding every text against plain decoding ...")
    texts = plain_texts(options.engine, prompts, [outcome.ask for outcome in outcomes])
    faults = faults_of(outcomes, texts)
    settled = [sample for sample in memory if sample.time_s > settled_s]
    means = [mean_resident(samples) for samples in rounds]
    times_s = [statistics.mean(sample.time_s for sample in samples) for samples in rounds]
    slope, error = slope_of(times_s, [mean[ALL] for mean in means])
    record = {
        "requests": len(outcomes),
        "minutes": options.minutes,
        "levels": options.levels,
        "rounds": options.rounds,
        "warm_up_minutes": options.warm_up_minutes,
        "finished": sum(o.generation is not None for o in outcomes),
        "left_early": sum(o.ask.fate == "cancelled" and o.generation is None for o in outcomes),
        "refused": sum(o.refusal is not None for o in outcomes),
        "faults": faults,
        "gauges_after": left,
        "memory_mib": {
            name: {process: round(mib, 1) for process, mib in {**sample.resident, "K/V pages": sample.pool}.items()}
            for name, sample in (("first", memory[0]), ("settled", settled[0]), ("last", memory[-1]))
        },
        "memory_mib_by_round": means,
        "memory_slope_mib_per_hour": {"slope": slope, "standard_error": error},
    }
    for fault in faults[:10]:
        console.print(f"[red]{fault}[/red]")
    console.print_json(json.dumps({**record, "faults": len(faults)}))
    options.write("serve-soak", machine, record)
    draw_memory(memory, settled_s, options.results / "serve-soak-memory.png")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    commands = {"throughput": Throughput, "arrivals": Arrivals, "overhead": Overhead, "soak": Soak}
    runs = {Throughput: throughput, Arrivals: arrivals, Overhead: overhead, Soak: soak}
    chosen = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    runs[type(chosen)](chosen)
