"""Which tree a step drafts, as data: parsed from one word of the command line, recorded in the manifest."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_paths import expansion_paths, likeliest_paths

MAX_TREE_NODES = 128


class TreeKind(StrEnum):
    """How the tree's shape comes about."""

    SINGLE = "single"
    CHAIN = "chain"
    STATIC = "static"
    DYNAMIC = "dynamic"
    MERGED = "merged"


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """A tree's shape. `budget` counts nodes, the root included.

    dynamic: EAGLE-2's tree; `depth` counts draft passes after the first (EAGLE's own `--depth`), so that a path holds at most
    depth + 1 drafted tokens; each node proposes `top_k` children and each level keeps `top_k` nodes.
    static: `choices` are paths of ranks, e.g. [0, 2] is the third-ranked child of the root's first child.
    """

    kind: TreeKind
    budget: int
    depth: int = 0
    top_k: int = 1
    choices: tuple[tuple[int, ...], ...] = ()
    widths: tuple[int, ...] = ()
    """cartesian: a dynamic tree in which every node of depth d proposes widths[d] children and all of them are expanded."""
    parts: tuple["TreeConfig", ...] = ()
    """merged: the tree of every head in turn; `budget` counts their nodes as if they had no path in common, `depth` levels."""
    name: str = ""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest possible node; the root has depth 0."""
        if self.kind is TreeKind.DYNAMIC:
            return self.depth + 1
        return self.depth

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """dynamic: of each draft pass, the children a node proposes and how many of all of them the next pass expands."""
        if not self.widths:
            return ((self.top_k, self.top_k),) * (self.depth + 1)
        return tuple((width, math.prod(self.widths[: depth + 1])) for depth, width in enumerate(self.widths))

    def to_json(self) -> dict[str, object]:
        """A value that `tree_config_from_json` reads back."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind is TreeKind.DYNAMIC and not self.widths:
            return f"dynamic:{self.budget}/{self.depth}/{self.top_k}"
        if self.kind is TreeKind.CHAIN:
            return f"chain:{self.depth}"
        if self.kind is TreeKind.MERGED:
            return "+".join(map(str, self.parts))
        return self.name or self.kind.value


def tree_config_from_json(value: dict) -> TreeConfig:
    """The config that `to_json` wrote."""
    choices = tuple(tuple(path) for path in value["choices"])
    widths = tuple(value.get("widths", ()))
    parts = tuple(map(tree_config_from_json, value.get("parts", ())))
    changed = {"kind": TreeKind(value["kind"]), "choices": choices, "widths": widths, "parts": parts}
    return TreeConfig(**{**value, **changed})


def shipped_choice_names() -> list[str]:
    """Names of the choice lists that come with furcate."""
    folder = resources.files("furcate.decoding") / "choices"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def parse_tree(text: str, head: HeadKind | None, num_heads: int = 0) -> TreeConfig:
    """The tree that `--tree text` asks for, checked against the head.

    Raises ConfigError for an unknown name, a malformed shape, or a tree the head cannot draft.
    """
    config = _parse(text, head)
    if head is None and config.kind is not TreeKind.SINGLE:
        raise ConfigError(f"tree '{text}' needs a head, and there is none; give --head, or --tree single.")
    if head in (HeadKind.MEDUSA, HeadKind.HYDRA) and config.max_depth > num_heads:
        if config.kind is TreeKind.DYNAMIC or config.kind is TreeKind.CHAIN:
            allowed = f"depth {num_heads - 1}" if config.kind is TreeKind.DYNAMIC else f"length {num_heads}"
            raise ConfigError(
                f"tree '{text}' is {config.max_depth} deep, and the head has {num_heads} heads; use {allowed}."
            )
        raise ConfigError(
            f"tree '{text}' is {config.max_depth} deep, and the head has {num_heads} heads; choose a shallower one."
        )
    return config


def _parse(text: str, head: HeadKind | None) -> TreeConfig:
    if text == "auto":
        return _default_tree(head)
    if text == "single":
        return TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single")
    if text.startswith("chain:"):
        (length,) = _numbers(text, "chain:", 1, "chain:5")
        return _checked(TreeConfig(kind=TreeKind.CHAIN, budget=length + 1, depth=length), text)
    if text.startswith("dynamic:"):
        budget, depth, top_k = _numbers(text, "dynamic:", 3, "dynamic:60/7/10")
        return _checked(_dynamic(budget, depth, top_k), text)
    if text.startswith("expansion:"):
        return _expansion(text)
    if text.startswith("cartesian:"):
        return _cartesian(text)
    if text.startswith("accuracies:"):
        return _from_accuracies(text)
    if text in shipped_choice_names():
        return static_tree(
            json.loads((resources.files("furcate.decoding") / "choices" / f"{text}.json").read_text()), text
        )
    if text.endswith(".json"):
        return static_tree(_read_choices(Path(text)), Path(text).stem)
    raise ConfigError(
        f"tree '{text}' is not known; use auto, dynamic:BUDGET/DEPTH/TOPK, chain:LENGTH, single, expansion:W1,W2,.., "
        f"cartesian:S1,S2,../BUDGET, accuracies:FILE.json/BUDGET, a .json file of choices, "
        f"or one of {', '.join(shipped_choice_names())}."
    )


def _expansion(text: str) -> TreeConfig:
    """SpecInfer's expansion: every node of depth d has as many children as the d-th number says."""
    widths = _list_of_numbers(text.removeprefix("expansion:"), text, "expansion:1,1,3,1,1")
    return static_tree([list(path) for path in _limited(expansion_paths, widths, text)], text)


def _cartesian(text: str) -> TreeConfig:
    """The product of the first S_d candidates of each depth; the step keeps its BUDGET most probable nodes."""
    example = "cartesian:4,3,2/16"
    body, slash, budget_text = text.removeprefix("cartesian:").partition("/")
    widths = _list_of_numbers(body, text, example)
    if slash and not (budget_text.isdecimal() and int(budget_text) > 0):
        raise ConfigError(f"tree '{text}' is malformed; write it like {example}, with positive numbers.")
    whole = 1 + len(_limited(expansion_paths, widths, text))
    budget = min(int(budget_text), whole) if slash else whole
    config = TreeConfig(
        kind=TreeKind.DYNAMIC, budget=budget, depth=len(widths) - 1, top_k=max(widths), widths=tuple(widths), name=text
    )
    return _checked(config, text)


def _from_accuracies(text: str) -> TreeConfig:
    """The most probable nodes under measured accuracies: a JSON list, per depth, of the chance of each rank."""
    file, slash, budget = text.removeprefix("accuracies:").rpartition("/")
    if not slash or not budget.isdecimal() or int(budget) < 2:
        raise ConfigError(f"tree '{text}' is malformed; write it like accuracies:measured.json/32.")
    rows = _read_json(Path(file), "accuracies file")
    is_table = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not is_table or not all(isinstance(p, int | float) and 0 <= p <= 1 for row in rows for p in row):
        raise ConfigError(f"accuracies file {file} must hold a list per depth of chances from 0 to 1, rank by rank.")
    paths = likeliest_paths([len(row) for row in rows], rows, min(int(budget), MAX_TREE_NODES))
    return static_tree([list(path) for path in paths[1:]], f"{Path(file).stem}/{budget}")


def _list_of_numbers(body: str, text: str, example: str) -> list[int]:
    parts = body.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"tree '{text}' is malformed; write it like {example}, with positive numbers.")
    return [int(part) for part in parts]


def _limited(paths_of: Callable[[list[int]], list], widths: list[int], text: str) -> list:
    """The paths, once it is clear that they are not too many to list."""
    count, level = 1, 1
    for width in widths:
        level *= width
        count += level
        if count > MAX_TREE_NODES:
            raise ConfigError(
                f"tree '{text}' has more than {MAX_TREE_NODES} nodes with its root; that many are allowed."
            )
    return paths_of(widths)


def _default_tree(head: HeadKind | None) -> TreeConfig:
    if head is None:
        return _parse("single", head)
    if head in (HeadKind.MEDUSA, HeadKind.HYDRA):
        return _dynamic(16, 2, 4)
    # tau / t(N) is best near 16 nodes on CPUs with bfloat16 tiles, and close to best on GPUs at batch sizes of 8 and more.
    return _dynamic(16, 4, 4)


def _dynamic(budget: int, depth: int, top_k: int) -> TreeConfig:
    # A tree larger than its levels can fill would hold padding only.
    budget = min(budget, 1 + top_k + depth * top_k * top_k)
    return TreeConfig(kind=TreeKind.DYNAMIC, budget=budget, depth=depth, top_k=top_k)


def static_tree(choices: list[list[int]], name: str) -> TreeConfig:
    """A static tree of rank paths; ConfigError unless every path's prefix is there too and ranks are not negative."""
    paths = sorted({tuple(path) for path in choices}, key=lambda path: (len(path), path))
    if not paths or any(not path or min(path) < 0 for path in paths):
        raise ConfigError(
            f"choices '{name}' must be a list of non-empty paths of ranks >= 0, such as [[0], [1], [0, 0]]."
        )
    known = set(paths)
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ConfigError(
                f"choices '{name}' hold {list(path)} but not its parent {list(path[:-1])}; add the parent."
            )
    config = TreeConfig(
        kind=TreeKind.STATIC,
        budget=len(paths) + 1,
        depth=max(map(len, paths)),
        top_k=1 + max(max(path) for path in paths),
        choices=tuple(paths),
        name=name,
    )
    return _checked(config, name)


def _checked(config: TreeConfig, text: str) -> TreeConfig:
    if config.budget > MAX_TREE_NODES:
        raise ConfigError(
            f"tree '{text}' has {config.budget} nodes with its root; at most {MAX_TREE_NODES} are allowed."
        )
    return config


def _numbers(text: str, prefix: str, count: int, example: str) -> list[int]:
    parts = text.removeprefix(prefix).split("/")
    # DEPTH may be 0: only the first draft pass's children.
    if len(parts) != count or not all(part.isdecimal() for part in parts) or int(parts[0]) < 1 or int(parts[-1]) < 1:
        raise ConfigError(f"tree '{text}' is malformed; write it like {example}, with positive numbers.")
    return [int(part) for part in parts]


def _read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}.") from error


def _read_choices(path: Path) -> list[list[int]]:
    value = _read_json(path, "choices file")
    is_choices = isinstance(value, list) and all(
        isinstance(choice, list) and all(isinstance(rank, int) for rank in choice) for choice in value
    )
    if not is_choices:
        raise ConfigError(f"choices file {path} must hold a list of lists of ranks, such as [[0], [1], [0, 0]].")
    return value
