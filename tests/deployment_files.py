"""What docker/ and docs/deploy.md say, as data: the documents, and every command in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "docker/Dockerfile"
COMPOSE = ROOT / "docker/compose.yaml"
TWO_GPUS = ROOT / "docker/compose.two-gpus.yaml"
KUBERNETES = ROOT / "docker/kubernetes"
GUIDE = ROOT / "docs/deploy.md"
MANIFESTS = tuple(KUBERNETES / name for name in ("build.yaml", "serve.yaml", "autoscale.yaml"))
KSERVE = KUBERNETES / "kserve.yaml"

COMMAND = re.compile(r"(?:^|\s)((?:build_engine|furcate|hf)\s[^\n|&;>]*)", re.MULTILINE)


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def document(path: Path, kind: str) -> dict[str, Any]:
    """The one document of that kind."""
    (found,) = (each for each in documents(path) if each["kind"] == kind)
    return found


def leaves(value: Any) -> Iterator[str | list[str]]:
    """Every string and every list of strings in a document."""
    if (isinstance(value, list) and value and all(isinstance(each, str) for each in value)) or isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)


def commands_in_text(text: str) -> list[list[str]]:
    """The furcate, build_engine and hf commands of a shell text, as words."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(found) for found in COMMAND.findall(joined)]


def commands_in_yaml(path: Path) -> list[list[str]]:
    """The commands in a YAML file's argument lists and shell texts."""
    found = []
    for leaf in leaves(documents(path)):
        words = [word for word in leaf if word not in ("CMD", "sh", "-c", "-ec")] if isinstance(leaf, list) else [leaf]
        if len(words) == 1:
            found += commands_in_text(words[0])
        elif words[0] in ("furcate", "build_engine"):
            found.append(words)
        elif words[0] == "mpirun":
            found += commands_in_text(words[-1])
    return found


def build_options() -> list[str]:
    """What compose.yaml builds when nobody says otherwise."""
    return _default_options(COMPOSE)


def _default_options(path: Path) -> list[str]:
    default = documents(path)[0]["services"]["engine"]["environment"]["BUILD_OPTIONS"]
    return shlex.split(re.fullmatch(r"\$\{BUILD_OPTIONS:-(.*)\}", default).group(1))  # pyright: ignore[reportOptionalMemberAccess]


def all_commands() -> list[tuple[str, list[str]]]:
    """(file, words) of every command in the deployment's files."""
    found = []
    for path in (COMPOSE, TWO_GPUS, KSERVE, *MANIFESTS):
        found += [(path.name, words) for words in commands_in_yaml(path)]
    blocks = re.findall(r"```\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    found += [(GUIDE.name, words) for block in blocks for words in commands_in_text(block)]
    shells = re.findall(r"^CMD \[(.*)\]$", DOCKERFILE.read_text(), re.MULTILINE)
    found += [(DOCKERFILE.name, [word.strip('" ') for word in shell.split(",")]) for shell in shells]
    found.append((TWO_GPUS.name, ["build_engine", *_default_options(TWO_GPUS), "--output", "x"]))
    in_environment = re.findall(r'BUILD_OPTIONS="(.*)"', GUIDE.read_text())
    found += [(GUIDE.name, ["build_engine", *shlex.split(each), "--output", "x"]) for each in in_environment]
    return [(name, _with_options(words)) for name, words in found]


def _with_options(words: list[str]) -> list[str]:
    return [each for word in words for each in (build_options() if word == "$$BUILD_OPTIONS" else [word])]
