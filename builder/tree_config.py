"""Which tree a step drafts, as data: parsed from one word of the command line, recorded in the manifest."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind

MAX_TREE_NODES = 128


class TreeKind(StrEnum):
    """How the tree's shape comes about."""

    SINGLE = "single"
    CHAIN = "chain"
    STATIC = "static"
    DYNAMIC = "dynamic"


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
    name: str = ""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest possible node; the root has depth 0."""
        if self.kind is TreeKind.DYNAMIC:
            return self.depth + 1
        return self.depth

    def to_json(self) -> dict[str, object]:
        """A value that `tree_config_from_json` reads back."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind is TreeKind.DYNAMIC:
            return f"dynamic:{self.budget}/{self.depth}/{self.top_k}"
        if self.kind is TreeKind.CHAIN:
            return f"chain:{self.depth}"
        return self.name or self.kind.value


def tree_config_from_json(value: dict) -> TreeConfig:
    """The config that `to_json` wrote."""
    choices = tuple(tuple(path) for path in value["choices"])
    return TreeConfig(**{**value, "kind": TreeKind(value["kind"]), "choices": choices})


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
    if text in shipped_choice_names():
        return static_tree(
            json.loads((resources.files("furcate.decoding") / "choices" / f"{text}.json").read_text()), text
        )
    if text.endswith(".json"):
        return static_tree(_read_choices(Path(text)), Path(text).stem)
    raise ConfigError(
        f"tree '{text}' is not known; use auto, dynamic:BUDGET/DEPTH/TOPK, chain:LENGTH, single, a .json file of choices, "
        f"or one of {', '.join(shipped_choice_names())}."
    )


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


def _read_choices(path: Path) -> list[list[int]]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"choices file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"choices file {path} is not JSON: {error}.") from error
    is_choices = isinstance(value, list) and all(
        isinstance(choice, list) and all(isinstance(rank, int) for rank in choice) for choice in value
    )
    if not is_choices:
        raise ConfigError(f"choices file {path} must hold a list of lists of ranks, such as [[0], [1], [0, 0]].")
    return value
