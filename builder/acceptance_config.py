"""Which rule decides what a step keeps, as data: one word of the command line, recorded in the manifest."""

from enum import StrEnum

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeConfig, TreeKind


class Acceptance(StrEnum):
    """The acceptance rules. All but typical and greedy leave every request's distribution exactly the target's."""

    AUTO = "auto"
    MATCH = "match"
    MULTI_STEP = "multi_step"
    RECURSIVE = "recursive"
    BLOCK = "block"
    TRAVERSAL = "traversal"
    UNIVER = "univer"
    TYPICAL = "typical"
    GREEDY = "greedy"

    @property
    def is_lossless(self) -> bool:
        """True when the text's distribution is exactly the target's. Greedy is, for the only temperature it serves: 0."""
        return self is not Acceptance.TYPICAL


_DRAWN_SHAPES = (TreeKind.SINGLE, TreeKind.CHAIN, TreeKind.STATIC)
_MERGEABLE = (Acceptance.MATCH, Acceptance.GREEDY, Acceptance.TYPICAL, Acceptance.MULTI_STEP)
"""Rules for the union of several heads' trees: other ways of drawing cannot be merged exactly."""
_TREES = {
    Acceptance.BLOCK: (TreeKind.SINGLE, TreeKind.CHAIN),
    Acceptance.MULTI_STEP: _DRAWN_SHAPES,
    Acceptance.RECURSIVE: _DRAWN_SHAPES,
    Acceptance.TRAVERSAL: _DRAWN_SHAPES,
}
_WHY = {
    Acceptance.BLOCK: "it verifies one chain; use --tree chain:LENGTH, or --acceptance traversal",
    Acceptance.MULTI_STEP: "its tokens are drawn, and a dynamic tree chooses among drawn tokens by probability, which would "
    "bias the text; use a chain, a choice list or expansion:..., or --acceptance match or univer",
}


def resolve_acceptance(acceptance: Acceptance, tree: TreeConfig, head: HeadKind | None = None) -> Acceptance:
    """The rule to record. `auto` becomes match for heads (docs/methods.md has the figures).

    A whole draft model's law is close to the target's, so that drawing from it is what its papers do: auto then becomes block on
    chains, univer on other trees. Raises ConfigError when the rule would not be exact on the tree.
    """
    if tree.kind is TreeKind.MERGED:
        return _resolve_merged(acceptance, tree)
    if acceptance is Acceptance.AUTO:
        if head is not HeadKind.MODEL or tree.max_depth == 0:
            return Acceptance.MATCH
        return Acceptance.BLOCK if tree.kind is TreeKind.CHAIN else Acceptance.UNIVER
    allowed = _TREES.get(acceptance)
    if allowed is not None and tree.kind not in allowed:
        why = _WHY.get(acceptance, _WHY[Acceptance.MULTI_STEP])
        raise ConfigError(f"acceptance '{acceptance}' does not go with tree '{tree}': {why}.")
    return acceptance


def can_adapt(num_heads: int, tree: TreeConfig, acceptance: Acceptance) -> bool:
    """Whether steps may draft smaller trees than this one and leave every text as it is: the rule must not draw drafts."""
    return num_heads == 1 and tree.max_depth > 0 and acceptance in (Acceptance.MATCH, Acceptance.GREEDY)


def _resolve_merged(acceptance: Acceptance, tree: TreeConfig) -> Acceptance:
    if acceptance is Acceptance.AUTO:
        return Acceptance.MATCH
    if acceptance not in _MERGEABLE:
        raise ConfigError(
            f"acceptance '{acceptance}' does not go with several heads: their trees merge exactly only where they are not drawn, "
            "or drawn with replacement; use --acceptance match or multi_step."
        )
    if acceptance is Acceptance.MULTI_STEP:
        for part in tree.parts:
            resolve_acceptance(acceptance, part)
    return acceptance
