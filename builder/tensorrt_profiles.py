"""Optimisation profiles: which shapes a plan is tuned for. Decoding trees and prompt chunks are profiles of the same network.

Axes: B batch, N nodes, W mask words ceil(N / 32), R rows asked for, P pages. A profile is named `decode-b<B>-n<N>` or
`prompt-n<N>`; its index in the plan is its place in the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from furcate.builder.errors import ConfigError
from furcate.builder.tensorrt_networks import EmittedNetwork

MAX_BATCH_BUCKETS = 6
BATCH_STEPS = (1, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Upper ends of the sizes that are tuned for, ascending. `prompt_tokens` is the longest prompt chunk, of one sequence."""

    batch_sizes: tuple[int, ...]
    tree_nodes: tuple[int, ...]
    prompt_tokens: int
    max_pages: int

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "tree_nodes"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigError(f"{name} are {list(sizes)}; give ascending sizes of at least 1.")

    def batch_bucket(self, batch: int) -> int:
        """The smallest bucket that holds `batch` sequences; ConfigError above the largest."""
        return _bucket(self.batch_sizes, batch, "sequences")

    def node_bucket(self, num_nodes: int) -> int:
        """The smallest bucket that holds a tree of `num_nodes`."""
        return _bucket(self.tree_nodes, num_nodes, "tree nodes")


@dataclass(frozen=True)
class Shape:
    """What one pass is: B sequences of N nodes, R of whose rows are asked for, and P pages each."""

    batch: int
    nodes: int
    rows: int
    pages: int

    def of(self, name: str, declared: tuple[int, ...]) -> tuple[int, ...]:
        """An input's shape in this pass; axes that are not dynamic stay as declared."""
        words = -(-self.nodes // 32)
        known = {
            "logit_rows": (self.batch, self.rows),
            "page_table": (self.batch, self.pages),
            "tree_mask": (self.batch, self.nodes, words),
        }
        sizes = known.get(name, (self.batch, self.nodes, *declared[2:]))[: len(declared)]
        return tuple(have if want == -1 else want for want, have in zip(declared, sizes, strict=True))


@dataclass(frozen=True)
class Profile:
    """A named range of passes."""

    name: str
    smallest: Shape
    typical: Shape
    largest: Shape


def default_buckets(max_batch_size: int, tree_budget: int, prompt_tokens: int, max_pages: int) -> Buckets:
    """The batch buckets; single nodes (plain decoding) and the whole tree."""
    return Buckets(
        batch_sizes=batch_buckets(max_batch_size),
        tree_nodes=(1, tree_budget) if tree_budget > 1 else (1,),
        prompt_tokens=prompt_tokens,
        max_pages=max_pages,
    )


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batches in steps of about two up to the largest: what plans are tuned for, and what steps are captured for."""
    return (*tuple(step for step in BATCH_STEPS if step < max_batch_size)[-MAX_BATCH_BUCKETS + 1 :], max_batch_size)


def all_profiles(buckets: Buckets) -> list[Profile]:
    """One profile per (batch bucket, node bucket), then the prompt chunk's.

    Decode profiles reach from the bucket below to their own end, so every batch and tree has exactly one.
    """
    profiles, pages = [], buckets.max_pages
    for below, batch in zip((0, *buckets.batch_sizes), buckets.batch_sizes, strict=False):
        for fewer, nodes in zip((0, *buckets.tree_nodes), buckets.tree_nodes, strict=False):
            smallest = Shape(below + 1, fewer + 1, 1, 1)
            typical = Shape(batch, nodes, nodes, max(1, pages // 2))
            profiles.append(Profile(f"decode-b{batch}-n{nodes}", smallest, typical, Shape(batch, nodes, nodes, pages)))
    tokens = buckets.prompt_tokens
    prompt = (Shape(1, 1, 1, 1), Shape(1, tokens, 1, max(1, pages // 2)), Shape(1, tokens, tokens, pages))
    profiles.append(Profile(f"prompt-n{tokens}", *prompt))
    return profiles


def profiles_of(network: EmittedNetwork, buckets: Buckets) -> list[Profile]:
    """The profiles that this network needs: a network without dynamic inputs needs none."""
    return all_profiles(buckets) if _dynamic_inputs(network.network) else []


def add_profiles(builder: Any, config: Any, network: EmittedNetwork, profiles: list[Profile]) -> None:
    """Adds every profile to the builder's config, in order."""
    for profile in profiles:
        native = builder.create_optimization_profile()
        for name, declared in _dynamic_inputs(network.network).items():
            shapes = (profile.smallest, profile.typical, profile.largest)
            native.set_shape(name, *(shape.of(name, declared) for shape in shapes))
        config.add_optimization_profile(native)


def _dynamic_inputs(network: Any) -> dict[str, tuple[int, ...]]:
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    return {tensor.name: tuple(tensor.shape) for tensor in tensors if -1 in tuple(tensor.shape)}


def _bucket(sizes: tuple[int, ...], wanted: int, what: str) -> int:
    for size in sizes:
        if wanted <= size:
            return size
    raise ConfigError(
        f"{wanted} {what} are more than the engine's largest bucket, {sizes[-1]}; build with larger ones."
    )
