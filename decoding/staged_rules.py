"""Which engines the `staged` layout serves."""

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind

STAGED_RULES = (Acceptance.MATCH, Acceptance.GREEDY)
HEADS = (HeadKind.MEDUSA, HeadKind.HYDRA, HeadKind.EAGLE, HeadKind.EAGLE3)


def check_staged(acceptance: str, head_kinds: list[str]) -> None:
    """ConfigError for an engine whose steps cannot be cut into stages."""
    if acceptance not in [rule.value for rule in STAGED_RULES]:
        raise ConfigError(
            f"layout staged sends the target's choices, and acceptance '{acceptance}' needs its laws; use --layout fused, or"
            " --acceptance match."
        )
    if len(head_kinds) > 1 or not set(head_kinds) <= {kind.value for kind in HEADS}:
        raise ConfigError("layout staged serves engines with one head (or none), not draft models; use --layout fused.")
