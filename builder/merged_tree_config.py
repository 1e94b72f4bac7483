"""The tree of an engine with several heads: each drafts its own, and what they have in common is verified once."""

from collections.abc import Sequence
from dataclasses import replace

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadSpec
from furcate.builder.tree_config import MAX_TREE_NODES, TreeConfig, TreeKind, parse_tree

SMALLEST_DEFAULT = 4


def parse_trees(text: str, heads: Sequence[HeadSpec]) -> TreeConfig:
    """The tree that `--tree text` asks for. With several heads: one tree for all of them, or one each, joined by "+".

    Raises ConfigError as `parse_tree` does, and for trees that cannot be merged.
    """
    if len(heads) < 2 or text == "single":
        return parse_tree(text, heads[0].kind if heads else None, heads[0].num_heads if heads else 0)
    texts = text.split("+")
    if len(texts) == 1:
        texts = texts * len(heads)
    if len(texts) != len(heads):
        raise ConfigError(
            f"tree '{text}' is for {len(texts)} heads, and there are {len(heads)}; give one tree for all, or one each."
        )
    return merged(
        [_part(part, head, len(heads)) for part, head in zip(texts, heads, strict=True)],
        text,
    )


def merged(parts: Sequence[TreeConfig], text: str) -> TreeConfig:
    """The tree of these parts. Raises ConfigError when one is no tree, or all are too large."""
    if any(part.kind is TreeKind.SINGLE for part in parts):
        raise ConfigError(f"tree '{text}' leaves a head without a tree; give each one, or --tree single for all.")
    budget = 1 + sum(part.budget - 1 for part in parts)
    if budget > MAX_TREE_NODES:
        raise ConfigError(f"tree '{text}' may have {budget} nodes with its root; at most {MAX_TREE_NODES} are allowed.")
    depth = max(part.max_depth for part in parts)
    return TreeConfig(kind=TreeKind.MERGED, budget=budget, depth=depth, parts=tuple(parts))


def _part(text: str, head: HeadSpec, num_heads: int) -> TreeConfig:
    tree = parse_tree(text, head.kind, head.num_heads)
    if text != "auto":
        return tree
    # Together as large as the tree of one head.
    return replace(tree, budget=max(tree.budget // num_heads, SMALLEST_DEFAULT))
