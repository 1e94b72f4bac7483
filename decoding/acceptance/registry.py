"""The acceptance rules by name."""

from furcate.builder.errors import ConfigError
from furcate.decoding.acceptance.block import BlockVerification
from furcate.decoding.acceptance.match import Greedy, SampleAndMatch
from furcate.decoding.acceptance.rule import AcceptanceRule
from furcate.decoding.acceptance.top_down import MultiStep, RecursiveRejection
from furcate.decoding.acceptance.traversal import Traversal
from furcate.decoding.acceptance.typical import Typical
from furcate.decoding.acceptance.univer import UniVer

RULES: dict[str, AcceptanceRule] = {
    rule.name: rule
    for rule in (
        Greedy(),
        SampleAndMatch(),
        MultiStep(),
        RecursiveRejection(),
        BlockVerification(),
        Traversal(),
        UniVer(),
        Typical(),
    )
}


def rule_named(name: str) -> AcceptanceRule:
    """The rule of that name. Raises ConfigError for an unknown one."""
    if name not in RULES:
        raise ConfigError(f"There is no acceptance rule named {name!r}; choose one of {', '.join(RULES)}.")
    return RULES[name]
