"""The locked lists: complete, pinned, and with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HASHED = ("server", "dev", "container")


def entries(name: str) -> dict[str, tuple[str, list[str]]]:
    """Package -> version and hashes of a list."""
    text = (ROOT / f"requirements/{name}.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        package, version, hashes = re.fullmatch(r"([\w.-]+)==(\S+)((?:\s+--hash=\S+)*)\s*", line).groups()
        found[canonicalize_name(package)] = (version, hashes.split())
    return found


@pytest.mark.parametrize("name", HASHED)
def test_every_package_has_hashes(name: str) -> None:
    without = {
        package
        for package, (_, hashes) in entries(name).items()
        if not hashes or not all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
    }
    assert without == set()


def test_torch_alone_has_none_and_a_list_of_its_own() -> None:
    ((package, (version, hashes)),) = entries("torch").items()
    assert (package, hashes) == ("torch", [])
    assert version == entries("container")["torch"][0]
    assert not {"torch"} & (entries("server").keys() | entries("dev").keys())


def test_the_lists_hold_what_pyproject_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, texts in {
        "server": PROJECT["dependencies"] + extras["api"] + extras["server"],
        "dev": PROJECT["dependencies"] + extras["api"] + extras["server"] + extras["dev"],
        "container": PROJECT["dependencies"] + extras["api"] + extras["gpu"],
    }.items():
        locked = entries(name) | entries("torch")
        wanted = [Requirement(text) for text in texts if not text.startswith("furcate[")]
        assert {each.name: locked[canonicalize_name(each.name)][0] for each in wanted} == {
            each.name: str(each.specifier).removeprefix("==") for each in wanted
        }
