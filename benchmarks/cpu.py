"""Speed on this CPU beside transformers: plain and speculative decoding, and `generate`, interleaved in one process.

    .venv/bin/python benchmarks/cpu.py ENGINE TARGET [--prompts examples/prompts.jsonl] [--limit 5] [--max-tokens 128]

ENGINE is an engine directory, TARGET the Hugging Face directory it was built from. Prints medians over prompts of tokens/s after
the first token, and ratios; writes benchmarks/results/cpu-<engine>-<threads>-threads.json. Run it on an idle machine.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import TreeConfig, TreeKind, parse_tree
from furcate.decoding.compare import Comparison, generate, total_of
from furcate.decoding.executors.torch import TORCH_DTYPES, TorchExecutor
from furcate.decoding.prompts import Prompt, read_prompts
from furcate.decoding.request import SamplingParams
from furcate.decoding.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which engine and prompts."""

    engine: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]
    prompts: Path = Path("examples/prompts.jsonl")
    limit: int = 5
    max_tokens: int = 128
    tree: str | None = None
    threads: int = 1
    """CPU threads. One is steadiest on a shared machine: a stalled core then delays nobody else's barrier."""
    results: Path = Path("benchmarks/results")


@torch.inference_mode()
def transformers_speed(model: PreTrainedModel, prompt: Prompt, max_tokens: int) -> float:
    """Tokens/s after the first of greedy `generate`: the time of all tokens less that of the first alone."""
    ids = torch.tensor([prompt.input_ids])
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **settings)
    middle = time.perf_counter()
    text = model.generate(ids, max_new_tokens=max_tokens, **settings)
    end = time.perf_counter()
    return (text.shape[1] - ids.shape[1] - 1) / ((end - middle) - (middle - start))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    engine = read_engine(options.engine)
    manifest = engine.manifest
    prompts = read_prompts(options.prompts, engine)[: options.limit]
    executor = TorchExecutor(engine)
    num_heads = manifest.head.num_heads if manifest.head else 0
    tree = manifest.tree if options.tree is None else parse_tree(options.tree, manifest.head_kind, num_heads)
    plain = Scheduler(executor, TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single"))
    speculative = Scheduler(executor, tree)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=TORCH_DTYPES[manifest.dtype]).eval()
    sampling = SamplingParams(max_tokens=options.max_tokens, end_ids=manifest.eos_token_ids)
    for scheduler in (plain, speculative):
        generate(scheduler, prompts[0], SamplingParams(max_tokens=8))
    transformers_speed(model, prompts[0], 8)
    comparisons, reference = [], []
    for prompt in prompts:
        reference.append(transformers_speed(model, prompt, options.max_tokens))
        runs = {"plain": generate(plain, prompt, sampling), "speculative": generate(speculative, prompt, sampling)}
        comparisons.append(Comparison(prompt=prompt.text, **runs))
    report(options, str(tree), manifest.dtype.value, comparisons, reference)


def report(options: Options, tree: str, dtype: str, comparisons: list[Comparison], reference: list[float]) -> None:
    """Prints and saves the figures."""
    total = total_of(comparisons)
    transformers = statistics.median(reference)
    ratios = [c.plain.tokens_per_second / r for c, r in zip(comparisons, reference, strict=True)]
    spec_ratios = [c.speculative.tokens_per_second / r for c, r in zip(comparisons, reference, strict=True)]
    rows = {
        "transformers generate": (transformers, 1.0),
        "furcate plain": (total.plain_tokens_per_second, statistics.median(ratios)),
        f"furcate {tree}": (total.speculative_tokens_per_second, statistics.median(spec_ratios)),
    }
    table = Table(
        "", "tokens/s", "x transformers", title=f"{options.engine.name}, {dtype}, {torch.get_num_threads()} threads"
    )
    for name, (speed, ratio) in rows.items():
        table.add_row(name, f"{speed:.1f}", f"{ratio:.2f}")
    console = Console()
    console.print(table)
    ms = {name: round(value, 2) for name, value in total.ms_per_step.items()}
    console.print(
        f"speculative / plain {total.ratio:.2f}, tau {total.tau:.3f}, identical {total.num_identical}/{total.num_prompts}, "
        f"outside target and head forward {100 * total.overhead_share:.1f}%, "
        f"of the promised speed {100 * total.promised_share:.0f}%",
        highlight=False,
    )
    console.print(f"ms per step {ms}; plain {total.plain_ms_per_step['step']:.1f}", highlight=False)
    options.results.mkdir(parents=True, exist_ok=True)
    record = {"tree": tree, "transformers_tokens_per_second": reference, "total": asdict(total)}
    record |= {name: {"tokens_per_second": speed, "x_transformers": ratio} for name, (speed, ratio) in rows.items()}
    path = options.results / f"cpu-{options.engine.name}-{options.threads}-threads.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")


main()
