"""Runs plain and speculative decoding side by side in one process and says whether they agree and what was gained."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import tyro

from furcate.builder.acceptance_config import Acceptance, can_adapt, resolve_acceptance
from furcate.builder.engine import read_engine
from furcate.builder.merged_tree_config import parse_trees
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.executors.load import load_executor
from furcate.decoding.prompts import Prompt, read_prompts
from furcate.decoding.request import Request, RequestStats, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.threads import settle_threads

PARTS = ("draft", "verify", "accept", "commit")
FORWARDS = ("target_forward", "head_forward")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare plain and speculative decoding of one engine on the same prompts, in one process.

    Example: furcate compare engines/smol --prompts examples/prompts.jsonl --max-tokens 128
    """

    engine: tyro.conf.Positional[Path]
    """Engine directory."""
    prompts: Path
    """JSON lines with 'prompt' or 'input_ids', or a text file with one prompt a line."""
    max_tokens: int = 128
    """Tokens to generate per prompt, at most."""
    limit: int | None = None
    """Use only the first prompts."""
    tree: str | None = None
    """Draft this tree instead of the engine's own (same words as build_engine --tree)."""
    acceptance: Acceptance | None = None
    """Accept drafts by this rule instead of the engine's own (same words as build_engine --acceptance)."""
    adaptive: bool | None = None
    """Let the tree grow and shrink with what is accepted (default: as the engine was built)."""
    temperature: float = 0.0
    """0 is greedy. Above 0 each prompt's texts are still equal under acceptance match: they share the prompt's seed."""
    seed: int = 0
    """Seed of the first prompt; the others count on from it."""
    threads: int | None = None
    """CPU threads; by default the faster of all cores and one, found out by trying."""
    json: Path | None = None
    """Also write the figures here."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One generation: its tokens, its counts, and seconds per part of its steps (prompt excluded)."""

    token_ids: tuple[int, ...]
    stats: RequestStats
    decode_seconds: float
    prefill_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, over the time of the steps that yielded them; 0 without steps."""
        return (self.stats.num_emitted_tokens - 1) / self.decode_seconds if self.stats.num_target_steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plain and speculative decoding of one prompt."""

    prompt: str
    plain: Run
    speculative: Run

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None when the texts are identical."""
        pairs = zip(self.plain.token_ids, self.speculative.token_ids, strict=False)
        for index, (a, b) in enumerate(pairs):
            if a != b:
                return index
        lengths = {len(self.plain.token_ids), len(self.speculative.token_ids)}
        return min(lengths) if len(lengths) > 1 else None


def generate(scheduler: Scheduler, prompt: Prompt, sampling: SamplingParams) -> Run:
    """One request alone on an idle scheduler."""
    clock = scheduler.executor.clock
    scheduler.add(Request(request_id=0, prompt_ids=prompt.input_ids, sampling=sampling))
    start = time.perf_counter()
    decode_start: float | None = None
    token_ids: list[int] = []
    while True:
        (output,) = scheduler.step()
        token_ids += output.token_ids
        if decode_start is None and output.stats.num_emitted_tokens:
            decode_start = time.perf_counter()
            clock.reset()
        if output.finish_reason is not None:
            break
    end = time.perf_counter()
    # A text whose first token is also its stop sequence has emitted nothing.
    decode_start = decode_start if decode_start is not None else end
    return Run(
        token_ids=tuple(token_ids),
        stats=output.stats,
        decode_seconds=end - decode_start,
        prefill_seconds=decode_start - start,
        seconds=clock.reset(),
    )


def compare_prompts(
    executor: EngineExecutor,
    prompts: list[Prompt],
    method: tuple[TreeConfig, Acceptance, bool | None],
    sampling: Callable[[int], SamplingParams],
    on_done: Callable[[Comparison], None] = lambda _: None,
) -> list[Comparison]:
    """Both kinds of decoding of every prompt, prompt by prompt, so that a noisy machine is fair to both."""
    single = TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single")
    plain = Scheduler(executor, single)
    tree, acceptance, is_adaptive = method
    speculative = Scheduler(executor, tree, acceptance, is_adaptive=is_adaptive)
    generate(plain, prompts[0], SamplingParams(max_tokens=4))
    generate(speculative, prompts[0], SamplingParams(max_tokens=8))
    comparisons = []
    for index, prompt in enumerate(prompts):
        params = sampling(index)
        runs = {"plain": generate(plain, prompt, params), "speculative": generate(speculative, prompt, params)}
        comparisons.append(Comparison(prompt=prompt.text, **runs))
        on_done(comparisons[-1])
    return comparisons


@dataclass(frozen=True, kw_only=True)
class Total:
    """Sums and medians over prompts. Times per step in ms; ratios are speculative over plain."""

    num_prompts: int
    num_identical: int
    tau: float
    tau_median: float
    target_steps: int
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    ratio: float
    ms_per_step: dict[str, float]
    plain_ms_per_step: dict[str, float]
    overhead_share: float
    """Share of a step outside the forward passes of target and head."""
    promised_share: float
    """Measured speed over what tau * t(1) / (t(N) + draft forward) promises."""


def total_of(comparisons: list[Comparison]) -> Total:
    """The totals. Speeds, times and ratios are medians over prompts; tau is emitted tokens over steps, of all prompts."""
    runs = [comparison.speculative for comparison in comparisons]
    plain = [comparison.plain for comparison in comparisons]
    steps = sum(run.stats.num_target_steps for run in runs)
    parts, plain_parts = _ms_per_step(runs), _ms_per_step(plain)
    return Total(
        num_prompts=len(runs),
        num_identical=sum(comparison.first_difference is None for comparison in comparisons),
        tau=sum(run.stats.num_emitted_tokens - 1 for run in runs) / max(steps, 1),
        tau_median=_median([run.stats.tau or 0.0 for run in runs]),
        target_steps=steps,
        plain_tokens_per_second=_median([run.tokens_per_second for run in plain]),
        speculative_tokens_per_second=_median([run.tokens_per_second for run in runs]),
        ratio=_median([_ratio(comparison) for comparison in comparisons]),
        ms_per_step=parts,
        plain_ms_per_step=plain_parts,
        overhead_share=_median([1 - _forward_seconds(run) / run.decode_seconds for run in runs if run.decode_seconds]),
        promised_share=_median([_promised_share(comparison) for comparison in comparisons]),
    )


def _ratio(comparison: Comparison) -> float:
    plain = comparison.plain.tokens_per_second
    return comparison.speculative.tokens_per_second / plain if plain else 1.0


def _forward_seconds(run: Run) -> float:
    return sum(run.seconds.get(part, 0.0) for part in FORWARDS)


def _promised_share(comparison: Comparison) -> float:
    """Measured speed-up over tau * t(1) / (t(N) + draft), the forward passes' times taken from the same two runs."""
    plain, run = comparison.plain, comparison.speculative
    if not plain.stats.num_target_steps or not run.stats.num_target_steps:
        return 1.0
    one = plain.seconds["target_forward"] / plain.stats.num_target_steps
    tree = _forward_seconds(run) / run.stats.num_target_steps
    return _ratio(comparison) / ((run.stats.tau or 1.0) * one / tree)


def _ms_per_step(runs: list[Run]) -> dict[str, float]:
    stepped = [run for run in runs if run.stats.num_target_steps]
    values = {
        part: _median([1e3 * run.seconds.get(part, 0.0) / run.stats.num_target_steps for run in stepped])
        for part in PARTS + FORWARDS
    }
    return {"step": _median([1e3 * run.decode_seconds / run.stats.num_target_steps for run in stepped]), **values}


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5)) if values else 0.0


def compare(config: CompareConfig) -> Total:
    """Runs the comparison, prints it, and returns its totals."""
    from furcate.decoding.compare_report import Report

    engine = read_engine(config.engine)
    manifest = engine.manifest
    tree = manifest.tree if config.tree is None else parse_trees(config.tree, manifest.heads)
    prompts = read_prompts(config.prompts, engine)[: config.limit]
    acceptance = resolve_acceptance(config.acceptance or manifest.acceptance, tree)
    is_adaptive = config.adaptive
    if is_adaptive is None:
        is_adaptive = manifest.is_adaptive and can_adapt(len(manifest.heads), tree, acceptance)
    executor = load_executor(engine)
    settle_threads(executor, config.threads)

    def sampling(index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=config.seed + index,
            end_ids=manifest.eos_token_ids,
        )

    with Report(manifest, tree, len(prompts), is_adaptive=is_adaptive) as report:
        comparisons = compare_prompts(executor, prompts, (tree, acceptance, is_adaptive), sampling, report.add)
        total = total_of(comparisons)
        report.close_with(total, config.temperature, acceptance)
    if config.json is not None:
        record = {"engine": manifest.name, "tree": str(tree), "acceptance": acceptance, "total": asdict(total)}
        config.json.write_text(json.dumps(record, indent=2) + "\n")
    return total
