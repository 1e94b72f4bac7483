"""What a speculative step costs in the `staged` layout, beside `fused`: both servers in one run, requests in turn.

    python benchmarks/layouts.py engines/smol --prompts examples/prompts.jsonl

Prints milliseconds a target step, medians over the prompts, for each number of streams at a time, and saves them with their ratio.
The same texts come from both, or it says so.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro
from host import check_fixed_budget, host
from rich.console import Console
from rich.table import Table

from furcate.builder.config import Layout
from furcate.builder.engine import read_engine
from furcate.client import Client
from furcate.client.results import Generation
from furcate.client.server import ServerConfig, TritonServer
from furcate.model_repository.generate import write_repository


@dataclass(frozen=True, kw_only=True)
class LayoutsConfig:
    """Measure the staged layout beside fused."""

    engine: tyro.conf.Positional[Path]
    """Engine directory; acceptance match or greedy, one head, built with --no-adaptive."""
    prompts: Path
    """A .jsonl file with a "prompt" in each line."""
    limit: int = 8
    """How many prompts."""
    max_tokens: int = 96
    streams: tuple[int, ...] = (1, 8)
    """How many requests at a time."""
    output: Path = Path("benchmarks/results/layouts.json")


def main() -> None:
    """Runs the comparison."""
    config = tyro.cli(LayoutsConfig, description=__doc__)
    check_fixed_budget(read_engine(config.engine))
    machine = host()
    lines = config.prompts.read_text().splitlines()[: config.limit]
    prompts = [json.loads(line)["prompt"] for line in lines]
    with servers(config.engine) as urls:
        clients = {layout: Client(url) for layout, url in urls.items()}
        for client in clients.values():
            client.generate(prompts[0], max_tokens=8, chat=True)
        rows = [measure(clients, prompts, count, config.max_tokens) for count in config.streams]
        for client in clients.values():
            client.close()
    Console().print(table(rows))
    config.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {"engine": config.engine.name, "max_tokens": config.max_tokens, "num_prompts": len(prompts)}
    record = {"host": machine, **settings, "rows": rows}
    config.output.write_text(json.dumps(record, indent=1) + "\n")


@contextmanager
def servers(engine: Path) -> Iterator[dict[Layout, str]]:
    """A server of each layout; only one is at work at any time."""
    with tempfile.TemporaryDirectory() as scratch:
        running: list[TritonServer] = []
        try:
            for layout in Layout:
                repository = write_repository(Path(scratch) / layout.value, engine_dir=engine, layout=layout)
                ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
                running.append(TritonServer(ServerConfig(repository=repository, **ports)))
                running[-1].start()
            yield {layout: server.grpc_url for layout, server in zip(Layout, running, strict=True)}
        finally:
            for server in running:
                server.stop()


def measure(clients: dict[Layout, Client], prompts: list[str], num_streams: int, max_tokens: int) -> dict[str, object]:
    """Medians of milliseconds a step with so many streams at a time; the layouts take turns with each group of prompts."""
    groups = [prompts[start : start + num_streams] for start in range(0, len(prompts), num_streams)]
    times: dict[Layout, list[float]] = {layout: [] for layout in clients}
    num_same = 0
    with ThreadPoolExecutor(num_streams) as pool:
        for group in groups:
            answers: dict[Layout, list[Generation]] = {}
            for layout, client in clients.items():

                def generate(prompt: str, client: Client = client) -> Generation:
                    return client.generate(prompt, max_tokens=max_tokens, end_id=-1, chat=True)

                answers[layout] = list(pool.map(generate, group))
                times[layout] += map(step_ms, answers[layout])
            pairs = zip(*answers.values(), strict=True)
            num_same += sum(one.token_ids == other.token_ids for one, other in pairs)
    medians = {layout.value: statistics.median(values) for layout, values in times.items()}
    return {
        "streams": num_streams,
        "step_ms": medians,
        "ratio": medians[Layout.STAGED.value] / medians[Layout.FUSED.value],
        "identical": num_same,
        "texts": len(prompts),
    }


def step_ms(answer: Generation) -> float:
    """Milliseconds between two steps of one answer, from the server's own times."""
    stats = answer.stats
    assert stats.first_token_time_ns is not None and stats.last_token_time_ns is not None
    return (stats.last_token_time_ns - stats.first_token_time_ns) / stats.num_target_steps / 1e6


def table(rows: list[dict]) -> Table:
    """The rows for a person."""
    shown = Table("streams", *(f"{layout.value} ms/step" for layout in Layout), "staged / fused", "identical")
    for row in rows:
        times = (f"{row['step_ms'][layout.value]:.2f}" for layout in Layout)
        shown.add_row(str(row["streams"]), *times, f"{row['ratio']:.2f}", f"{row['identical']} of {row['texts']}")
    return shown


if __name__ == "__main__":
    main()
