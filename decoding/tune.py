"""`furcate tune`: measures an engine on this device, and gives it the tree that is fastest here.

First what everything is made of is measured (times of passes, acceptance by rank); from that the speed of every candidate
follows; the best of each family are then run side by side, and the fastest is recorded in the manifest.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import tyro

from furcate.builder.acceptance_config import Acceptance, can_adapt, resolve_acceptance
from furcate.builder.engine import Manifest, read_engine, rewrite_manifest
from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import MAX_TREE_NODES, TreeConfig, TreeKind, parse_tree, static_tree
from furcate.decoding.compare import generate
from furcate.decoding.drafters.grow import grower_of
from furcate.decoding.executors.executor import EngineExecutor
from furcate.decoding.executors.load import load_executor
from furcate.decoding.pass_times import PassTimes, measure_passes
from furcate.decoding.prompts import Prompt, read_prompts
from furcate.decoding.request import SamplingParams
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.sequoia import StepTimes, plans
from furcate.decoding.step import proposer_of
from furcate.decoding.tree_shape import expansion_shape
from furcate.decoding.tune_ranks import Follower, Ranks

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8)
NUM_RANKS = 10
DYNAMIC = ("6/1/3", "8/2/3", "12/3/3", "16/3/4", "16/4/4", "24/4/4", "32/5/6", "48/5/8")
PLAIN = TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Find the tree that is fastest with this engine on this device, and record it in the engine's manifest.

    Example: furcate tune engines/smol --prompts examples/prompts.jsonl
    """

    engine: tyro.conf.Positional[Path]
    """Engine directory. Its manifest and config.json are replaced, its weights are not touched."""
    prompts: Path
    """JSON lines with 'prompt' or 'input_ids', or a text file with one prompt a line: text like that to be served."""
    limit: int = 6
    """Use only the first prompts."""
    max_tokens: int = 64
    """Tokens to generate per prompt, at most."""
    temperature: float = 0.0
    """The temperature to tune for. Higher ones are accepted less and want smaller trees."""
    max_depth: int = 6
    """Deepest tree to look at."""
    rounds: int = 1
    """How often every prompt is run with every candidate; more is steadier on a noisy machine."""
    plot: Path | None = None
    """Where to draw the curves (PNG). Default: tuning.png beside the engine's manifest."""
    dry_run: bool = False
    """Measure and print, record nothing."""
    threads: int | None = None
    """CPU threads; all by default."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tree, what it should give and, where it was run, what it gave. Ratios are to plain decoding."""

    tree: TreeConfig
    family: str
    predicted_tau: float
    step_ms: float
    plain_ms: float
    measured_tau: float | None = None
    measured_ratio: float | None = None

    @property
    def predicted_ratio(self) -> float:
        """tau times the speed of its steps over plain decoding's."""
        return self.predicted_tau * self.plain_ms / self.step_ms


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All that was measured, and what was chosen."""

    temperature: float
    device: str
    times: PassTimes
    rank_rates: list[list[float]]
    candidates: list[Candidate]
    chosen: Candidate

    def to_json(self) -> dict[str, object]:
        """What the manifest keeps."""
        return {
            "temperature": self.temperature,
            "device": self.device,
            "verify_ms": {str(size): ms for size, ms in self.times.verify_ms.items()},
            "draft_ms": {str(width): ms for width, ms in self.times.draft_ms.items()},
            "verify_sequence_ms": self.times.verify_sequence_ms,
            "draft_sequence_ms": self.times.draft_sequence_ms,
            "rank_rates": self.rank_rates,
            "candidates": [
                {"tree": str(c.tree), "predicted_ratio": c.predicted_ratio, **_without_tree(c)} for c in self.candidates
            ],
            "chosen": str(self.chosen.tree),
        }


def _without_tree(candidate: Candidate) -> dict[str, object]:
    value = asdict(candidate)
    del value["tree"]
    return value


def tune(config: TuneConfig, on_candidates: Callable[[list[Candidate]], None] = lambda _: None) -> Tuning:
    """Measures, chooses and (unless it is a dry run) records. `on_candidates` sees the predictions before they are run.

    Raises ConfigError for an engine without a head, EngineMismatch for one that cannot be run here.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    engine = read_engine(config.engine)
    if engine.manifest.head is None:
        raise ConfigError(f"{config.engine} has no head, so there is no tree to tune; build it with --head.")
    if engine.manifest.more_heads:
        raise ConfigError(f"{config.engine} has {len(engine.manifest.heads)} heads; tune an engine of one of them.")
    prompts = read_prompts(config.prompts, engine)[: config.limit]
    executor = load_executor(engine)
    candidates, times, rates = predict(config, executor, prompts)
    on_candidates(candidates)
    candidates = run_candidates(config, executor, prompts, candidates)
    run = [candidate for candidate in candidates if candidate.measured_ratio is not None]
    chosen = max(run, key=lambda candidate: candidate.measured_ratio or 0.0)
    tuning = Tuning(
        temperature=config.temperature,
        device=str(executor.device),
        times=times,
        rank_rates=rates,
        candidates=candidates,
        chosen=chosen,
    )
    if not config.dry_run:
        record(config.engine, engine.manifest, tuning)
    return tuning


def record(path: Path, manifest: Manifest, tuning: Tuning) -> None:
    """Gives the engine at `path` the chosen tree; the directory is replaced at once or not at all."""
    tree = tuning.chosen.tree
    acceptance = manifest.acceptance
    try:
        resolve_acceptance(acceptance, tree)
    except ConfigError:
        acceptance = resolve_acceptance(Acceptance.AUTO, tree, manifest.head_kind)
    is_adaptive = manifest.is_adaptive and can_adapt(len(manifest.heads), tree, acceptance)
    tuned = replace(manifest, tree=tree, acceptance=acceptance, is_adaptive=is_adaptive, tuning=tuning.to_json())
    rewrite_manifest(path, tuned)


def predict(
    config: TuneConfig, executor: EngineExecutor, prompts: list[Prompt]
) -> tuple[list[Candidate], PassTimes, list[list[float]]]:
    """Every candidate with its predicted tau and step time, the pass times, and the acceptance of every rank."""
    head = executor.manifest.head
    assert head is not None
    is_medusa = head.kind in (HeadKind.MEDUSA, HeadKind.HYDRA)
    max_depth = min(config.max_depth, head.num_heads) if is_medusa else config.max_depth
    proposer = proposer_of(executor, max_depth)
    assert proposer is not None
    context = min(256, executor.manifest.max_context_tokens // 2)
    times = measure_passes(executor, proposer, SIZES, WIDTHS, context)
    dynamic = [tree for tree in _dynamic_trees(head.kind, head.num_heads) if tree.max_depth <= max_depth]
    follower = Follower(executor, proposer, max_depth, min(NUM_RANKS, head.draft_vocab_size))
    growers = {str(tree): grower_of(tree) for tree in dynamic}
    for prompt, text in _plain_texts(config, executor, prompts):
        if len(text) > 1:
            follower.follow(prompt.input_ids, text, growers, _greedy_rows(executor))
    rates = follower.ranks.rates()
    candidates = [_candidate(PLAIN, "plain", 1.0, times), *_fixed_candidates(follower.ranks, times, max_depth)]
    for tree in dynamic:
        accepted = follower.accepted.get(str(tree), [0])
        candidates.append(_candidate(tree, "dynamic", 1 + sum(accepted) / len(accepted), times))
    return candidates, times, rates


def _candidate(tree: TreeConfig, family: str, tau: float, times: PassTimes) -> Candidate:
    width = tree.top_k if tree.kind is TreeKind.DYNAMIC else max(1, tree.budget // max(tree.max_depth, 1) // 2)
    drafting = times.draft(tree.max_depth - 1, width) if tree.max_depth else 0.0
    return Candidate(
        tree=tree,
        family=family,
        predicted_tau=tau,
        step_ms=times.verify(tree.budget) + drafting,
        plain_ms=times.verify(1),
    )


def _fixed_candidates(ranks: Ranks, times: PassTimes, max_depth: int) -> Iterator[Candidate]:
    """Chains of every length, and Sequoia's best tree of every budget."""
    for length in range(1, max_depth + 1):
        tree = TreeConfig(kind=TreeKind.CHAIN, budget=length + 1, depth=length)
        yield _candidate(tree, "chain", ranks.tau_of(expansion_shape([1] * length)), times)
    step_times = StepTimes(
        verify_ms={size: times.verify_ms[size] + times.draft_ms[0] for size in SIZES if size > 2},
        draft_ms=times.draft(1, 2) - times.draft_ms[0],
    )
    for plan in plans(ranks.rates(), step_times, max_depth):
        paths = [list(path) for path in plan.shape.paths[1:]]
        if paths:
            tree = static_tree(paths, f"sequoia:{plan.shape.num_nodes}")
            yield _candidate(tree, "sequoia", ranks.tau_of(plan.shape), times)


def _dynamic_trees(kind: HeadKind, num_heads: int) -> list[TreeConfig]:
    trees = []
    for text in DYNAMIC:
        try:
            trees.append(parse_tree(f"dynamic:{text}", kind, num_heads))
        except ConfigError:
            continue  # deeper than there are Medusa heads
    return [tree for tree in trees if tree.budget <= MAX_TREE_NODES]


def _plain_texts(
    config: TuneConfig, executor: EngineExecutor, prompts: list[Prompt]
) -> Iterator[tuple[Prompt, list[int]]]:
    scheduler = Scheduler(executor, PLAIN, Acceptance.MATCH)
    for index, prompt in enumerate(prompts):
        yield prompt, list(generate(scheduler, prompt, _sampling(config, executor, index)).token_ids)


def _sampling(config: TuneConfig, executor: EngineExecutor, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=index,
        end_ids=executor.manifest.eos_token_ids,
    )


def _greedy_rows(executor: EngineExecutor) -> SamplingRows:
    device = executor.device
    return SamplingRows(
        temperature=torch.zeros(1, device=device),
        top_k=torch.full((1,), executor.manifest.target.vocab_size, device=device),
        top_p=torch.ones(1, device=device),
        seeds=torch.zeros(1, dtype=torch.int64, device=device),
        is_greedy=True,
        largest_top_k=None,
        uses_top_p=False,
    )


def run_candidates(
    config: TuneConfig, executor: EngineExecutor, prompts: list[Prompt], candidates: list[Candidate]
) -> list[Candidate]:
    """The candidates, the most promising of each family with what they measured. Prompt by prompt, so noise hits all alike."""
    chosen = _most_promising(candidates)
    schedulers = {index: Scheduler(executor, candidates[index].tree, Acceptance.MATCH) for index in chosen}
    totals = {index: [0, 0, 0.0] for index in chosen}
    for scheduler in schedulers.values():
        generate(scheduler, prompts[0], SamplingParams(max_tokens=6))
    for _ in range(config.rounds):
        for number, prompt in enumerate(prompts):
            for index, scheduler in schedulers.items():
                run = generate(scheduler, prompt, _sampling(config, executor, number))
                steps = [run.stats.num_emitted_tokens - 1, run.stats.num_target_steps, run.decode_seconds]
                totals[index] = [a + b for a, b in zip(totals[index], steps, strict=True)]
    plain_tokens, _, plain_seconds = totals[0]
    measured = list(candidates)
    for index, (tokens, steps, seconds) in totals.items():
        ratio = (tokens / seconds) / (plain_tokens / plain_seconds) if tokens and plain_tokens else 1.0
        measured[index] = replace(candidates[index], measured_tau=tokens / max(steps, 1), measured_ratio=ratio)
    return measured


def _most_promising(candidates: list[Candidate]) -> list[int]:
    """Plain decoding, and the best by prediction: two chains, two of Sequoia's trees, three dynamic ones."""
    chosen = [0]
    for family, count in (("chain", 2), ("sequoia", 2), ("dynamic", 3)):
        members = [index for index, candidate in enumerate(candidates) if candidate.family == family]
        chosen += sorted(members, key=lambda index: -candidates[index].predicted_ratio)[:count]
    return chosen
