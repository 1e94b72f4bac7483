"""Many sampled continuations of one prompt through the real step, and the exact law that they must follow.

B rows share the prompt's pages and differ in their seed alone; those that are alike share the target's passes. The law is
computed from the target's logits, context by context, with sorting and float64, sharing no code with the sampler.
"""

from collections import Counter
from dataclasses import dataclass, fields

import torch
from shared_passes import SharedPasses
from torch import Tensor

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.network.inputs import PassInputs
from furcate.builder.tree_config import TreeConfig
from furcate.decoding.drafters.proposer import Committed, DraftRows
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.step import Step, StepRows

NUM_TOKENS = 3
NUM_LIKELY = 64
LEAST_EXPECTED = 5
"""Cells expected less often than this are counted together, as the chi-square approximation wants."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What every row asks for."""

    temperature: float
    top_k: int
    top_p: float

    def rows(self, seeds: Tensor) -> SamplingRows:
        return SamplingRows(
            temperature=torch.full(seeds.shape, self.temperature),
            top_k=torch.full(seeds.shape, self.top_k),
            top_p=torch.full(seeds.shape, self.top_p),
            seeds=seeds,
            is_greedy=self.temperature == 0,
            largest_top_k=self.top_k,
            uses_top_p=self.top_p < 1,
        )

    def law(self, logits: Tensor) -> dict[int, float]:
        """Tokens and probabilities after temperature, top-k, top-p: token by token, most probable first."""
        law = (logits.double() / self.temperature).softmax(-1)
        probs, tokens = law.sort(descending=True)
        probs = probs[: self.top_k] / probs[: self.top_k].sum()
        kept, total = {}, 0.0
        for token, prob in zip(tokens.tolist(), probs.tolist(), strict=False):
            if total >= self.top_p:
                break
            kept[token] = prob
            total += prob
        return {token: prob / total for token, prob in kept.items()}


class Continuations:
    """Samples the next three tokens after `prompt`, whose last token is the root and whose others fill whole pages.

    With a `vocabulary` the step sees no other tokens (see shared_passes.py).
    """

    def __init__(
        self,
        executor: TorchExecutor,
        mode: tuple[TreeConfig, Acceptance],
        prompt: list[int],
        vocabulary: Tensor | None = None,
    ) -> None:
        tree, acceptance = mode
        page_size = executor.manifest.page_size
        self.length = len(prompt) - 1
        assert self.length % page_size == 0
        self.num_shared = self.length // page_size
        self.executor, self.prompt = SharedPasses(executor, self.num_shared, vocabulary), prompt
        places = torch.searchsorted(self.executor.vocabulary, torch.tensor(prompt))
        self.step = Step(self.executor, tree, acceptance)  # pyright: ignore[reportArgumentType]
        self.num_own = -(-(NUM_TOKENS * (tree.max_depth + 1) + self.step.num_slots) // page_size)
        table = torch.arange(self.num_shared, dtype=torch.int32)[None]
        outputs = executor.target_pass(_chain(prompt[:-1], 0, table))
        self.states = torch.empty(1, 0)
        self.root_id = int(places[-1])
        if self.step.proposer is not None:
            self.states = self.step.proposer.observe(
                Committed(
                    features=outputs.features,
                    first_ids=places[:1],
                    next_ids=places[None, 1:],
                    counts=torch.tensor([self.length]),
                    cache_lengths=torch.zeros(1, dtype=torch.int32),
                    page_table=table,
                    is_prompt=True,
                )
            )

    def first_rows(self, num_rows: int) -> DraftRows:
        """Rows that have read the prompt and written nothing, each with pages of its own behind the shared ones."""
        own = torch.arange(num_rows * self.num_own, dtype=torch.int32).view(num_rows, -1) + self.num_shared
        self.executor.histories = [()] * num_rows
        return DraftRows(
            states=self.states.expand(num_rows, -1),
            root_ids=torch.full((num_rows,), self.root_id),
            cache_lengths=torch.full((num_rows,), self.length, dtype=torch.int32),
            page_table=torch.cat([torch.arange(self.num_shared, dtype=torch.int32).expand(num_rows, -1), own], 1),
        )

    @torch.inference_mode()
    def sample(self, sampling: Sampling, num_rows: int, first_seed: int) -> Tensor:
        """[num_rows, 3] tokens; row r has the seed first_seed + r."""
        rows = self.first_rows(num_rows)
        seeds = torch.arange(first_seed, first_seed + num_rows)
        texts: dict[int, tuple[int, ...]] = dict.fromkeys(seeds.tolist(), ())
        while len(seeds) > 0:
            self.executor.histories = [texts[seed] for seed in seeds.tolist()]
            result = self.step.run(StepRows(draft=rows, sampling=sampling.rows(seeds)))
            counts = result.num_tokens.tolist()
            for seed, count, token_ids in zip(seeds.tolist(), counts, result.token_ids.tolist(), strict=True):
                texts[seed] += tuple(token_ids[:count])
            rows = DraftRows(
                states=result.states,
                root_ids=result.token_ids.gather(1, result.num_tokens[:, None] - 1).squeeze(1),
                cache_lengths=(rows.cache_lengths + result.num_tokens).int(),
                page_table=rows.page_table,
            )
            is_short = torch.tensor([len(texts[seed]) < NUM_TOKENS for seed in seeds.tolist()])
            rows, seeds = _rows_where(is_short, rows), seeds[is_short]
        return self.executor.vocabulary[torch.tensor([text[:NUM_TOKENS] for text in texts.values()])]

    def law(self, sampling: Sampling) -> dict[tuple[int, ...], float]:
        """The exact law of the next three tokens."""
        return exact_law(self.executor.alone, self.prompt, sampling)


@torch.inference_mode()
def exact_law(
    executor: TorchExecutor, prompt: list[int], sampling: Sampling, likely: set[int] | None = None
) -> dict[tuple[int, ...], float]:
    """The exact law of the three tokens after `prompt`, whose last token follows whole pages, in the pool already.

    `likely` takes in the most probable tokens after every text that is a beginning of one.
    """
    law: dict[tuple[int, ...], float] = {(): 1.0}
    length = len(prompt) - 1
    scratch = torch.arange(length // executor.manifest.page_size + 2, dtype=torch.int32)[None]
    for _ in range(NUM_TOKENS):
        longer = {}
        for path, prob in law.items():
            logits = executor.target_pass(_chain([prompt[-1], *path], length, scratch)).logits[0, -1]
            longer |= {(*path, token): prob * p for token, p in sampling.law(logits).items()}
            if likely is not None:
                likely |= set(logits.topk(NUM_LIKELY).indices.tolist())
        law = longer
    return law


@torch.inference_mode()
def likely_tokens(executor: TorchExecutor, prompt: list[int], sampling: Sampling) -> Tensor:
    """Ascending ids: the prompt's tokens, and the most probable ones after every text that `sampling` can begin with."""
    assert sampling.top_k <= NUM_LIKELY
    table = torch.arange(len(prompt) // executor.manifest.page_size, dtype=torch.int32)[None]
    executor.target_pass(_chain(prompt[:-1], 0, table))
    likely = set(prompt)
    exact_law(executor, prompt, sampling, likely)
    return torch.tensor(sorted(likely))


def chi_square_p(samples: Tensor, law: dict[tuple[int, ...], float]) -> float:
    """The chance that samples of this law would differ from it as much as these do, or more."""
    found = Counter(map(tuple, samples.tolist()))
    assert found.keys() <= law.keys(), f"never said by the target: {found.keys() - law.keys()}"
    statistic, num_cells, rare, rare_found = 0.0, 0, 0.0, 0
    for path, prob in law.items():
        expected = prob * len(samples)
        if expected < LEAST_EXPECTED:
            rare, rare_found = rare + expected, rare_found + found[path]
            continue
        statistic += (found[path] - expected) ** 2 / expected
        num_cells += 1
    if rare > 0:
        statistic += (rare_found - rare) ** 2 / rare
        num_cells += 1
    half = torch.tensor((num_cells - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def _rows_where(is_kept: Tensor, rows: DraftRows) -> DraftRows:
    return DraftRows(**{field.name: getattr(rows, field.name)[is_kept] for field in fields(rows)})


def _chain(tokens: list[int], length: int, table: Tensor) -> PassInputs:
    return PassInputs(
        token_ids=torch.tensor([tokens]),
        positions=torch.arange(length, length + len(tokens), dtype=torch.int32)[None],
        tree_mask=None,
        cache_lengths=torch.tensor([length], dtype=torch.int32),
        page_table=table,
    )
