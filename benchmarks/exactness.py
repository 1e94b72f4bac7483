"""Is every greedy text identical to plain greedy decoding, and what is tau: all heads, all kinds of tree, all prompts.

    .venv/bin/python benchmarks/exactness.py ENGINE... [--prompts examples/prompts.jsonl] [--max-tokens 128]

ENGINEs are float32 engines of one target (one a head). Plain texts are made once, one prompt at a time; every tree's texts in
batches, the harder case. Tau is given twice: of emitted tokens, and as peers count it, with what the token limit cut off.
Writes benchmarks/results/exactness.json. Speed plays no part, so it may share the machine.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console

from furcate.builder.engine import read_engine
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeConfig, parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.prompts import Prompt, read_prompts
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

EAGLE_TREES = ("chain:5", "eagle_mc_sim_7b_63", "dynamic:16/4/4", "dynamic:60/7/10")
TREES = {
    HeadKind.EAGLE3: EAGLE_TREES,
    HeadKind.EAGLE: EAGLE_TREES,
    HeadKind.MEDUSA: ("chain:4", "mc_sim_7b_63", "dynamic:16/3/4"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which engines and prompts."""

    engines: tyro.conf.Positional[tuple[Path, ...]]
    prompts: Path = Path("examples/prompts.jsonl")
    max_tokens: int = 128
    batch_size: int = 8
    results: Path = Path("benchmarks/results")


def texts_of(
    scheduler: Scheduler, prompts: list[Prompt], sampling: SamplingParams, batch_size: int
) -> list[tuple[int, ...]]:
    """The text of every prompt, at most `batch_size` of them at a time."""
    texts: list[tuple[int, ...]] = [()] * len(prompts)
    waiting = list(enumerate(prompts))
    while waiting or scheduler.sequences:
        while waiting and len(scheduler.sequences) < batch_size:
            index, prompt = waiting.pop(0)
            scheduler.add(Request(request_id=index, prompt_ids=prompt.input_ids, sampling=sampling))
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
    return texts


class StepCount:
    """Counts a scheduler's row-steps and the tokens they yielded before any cut."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_steps = self.num_yielded = 0
        run = scheduler._step.run

        def counted(rows):
            result = run(rows)
            self.num_steps += len(result.num_tokens)
            self.num_yielded += int(result.num_tokens.sum())
            return result

        scheduler._step.run = counted


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    console = Console(width=120)
    plain: list[tuple[int, ...]] = []
    rows = []
    for path in options.engines:
        engine = read_engine(path)
        prompts = read_prompts(options.prompts, engine)
        sampling = SamplingParams(max_tokens=options.max_tokens, end_ids=engine.manifest.eos_token_ids)
        executor = TorchExecutor(engine)
        if not plain:
            plain = texts_of(Scheduler(executor, parse_tree("single", None)), prompts, sampling, batch_size=1)
            console.print(
                f"plain: {sum(map(len, plain))} tokens of {len(prompts)} prompts, {torch.get_num_threads()} threads"
            )
        kind = engine.manifest.head_kind
        assert kind is not None, f"{path} has no head"
        for name in TREES[kind]:
            tree: TreeConfig = parse_tree(name, kind, engine.manifest.head.num_heads)
            scheduler = Scheduler(executor, tree)
            count = StepCount(scheduler)
            texts = texts_of(scheduler, prompts, sampling, options.batch_size)
            identical = sum(a == b for a, b in zip(texts, plain, strict=True))
            emitted = sum(len(text) - 1 for text in texts)
            row = {
                "head": kind.value,
                "tree": name,
                "identical": identical,
                "prompts": len(prompts),
                "tau": emitted / count.num_steps,
                "tau_uncut": count.num_yielded / count.num_steps,
                "target_steps": count.num_steps,
            }
            rows.append(row)
            console.print(
                f"{kind.value:<7} {name:<20} identical {identical}/{len(prompts)}  tau {row['tau']:.3f} "
                f"(uncut {row['tau_uncut']:.3f})  target steps {count.num_steps}",
                highlight=False,
            )
            options.results.mkdir(parents=True, exist_ok=True)
            (options.results / "exactness.json").write_text(json.dumps(rows, indent=2) + "\n")


main()
