"""The exact law of a rule's output: every tree that may be drawn, times every branch that the rule's own code may take.

R rows: one per tree and branch. The rule under test runs as it does in a step; only its coins are replaced. A run that
comes to a coin not decided yet stops there; each row then splits into one row per outcome of positive probability, and the
run starts again with those outcomes decided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor
from toy_models import VOCABULARY, Context, Pair

from furcate.decoding.acceptance.accepted import Accepted
from furcate.decoding.tree import DraftKind, DraftLaws, Tree
from furcate.decoding.tree_shape import TreeShape

Accept = Callable[[Tree, Tensor, "BranchCoins"], Accepted]


@dataclass(frozen=True)
class Drafts:
    """All trees that drafting may give, and their probabilities; with the target's laws after their nodes."""

    pair: Pair
    tree: Tree
    weights: Tensor
    target: Tensor

    def rows(self, indices: Tensor) -> tuple[Tree, Tensor]:
        """The trees at these indices, and their target laws."""
        return tree_rows(self.tree, indices), self.target[indices]


@dataclass(frozen=True)
class Law:
    """What comes out: the law of the next three tokens, and the mean number of accepted drafts."""

    next_three: Tensor
    mean_drafts: float

    def error(self, pair: Pair) -> float:
        """The largest difference from the target's law."""
        return (self.next_three - pair.next_three).abs().max().item()


class UndecidedError(Exception):
    """A coin whose outcome the script does not say."""

    def __init__(self, probs: Tensor) -> None:
        self.probs = probs


class BranchCoins:
    """`Coins` that follow a script of outcomes, one column a call, and keep each row's probability."""

    def __init__(self, script: Tensor) -> None:
        self.script, self.num_calls = script, 0
        self.weights = torch.ones(len(script), dtype=torch.float64)
        self.picks: list[tuple[Tensor, Tensor]] = []

    def _branch(self, probs: Tensor) -> Tensor:
        if self.num_calls == self.script.shape[1]:
            raise UndecidedError(probs)
        outcomes = self.script[:, self.num_calls]
        self.num_calls += 1
        self.weights = self.weights * probs.gather(1, outcomes[:, None]).squeeze(1)
        return outcomes

    def flip(self, trials: Tensor, probs: Tensor) -> Tensor:
        assert ((probs >= 0) & (probs <= 1)).all(), probs[((probs < 0) | (probs > 1) | probs.isnan())]
        return self._branch(torch.stack([1 - probs, probs], 1)) == 1

    def first(self, order: Tensor, probs: Tensor) -> Tensor:
        assert ((probs >= 0) & (probs <= 1)).all(), probs[((probs < 0) | (probs > 1) | probs.isnan())]
        none_before = torch.nn.functional.pad((1 - probs).cumprod(1), (1, 0), value=1.0)
        assert none_before[:, -1].abs().max() < 1e-12
        return order.gather(1, self._branch(probs * none_before[:, :-1])[:, None]).squeeze(1)

    def pick(self, nodes: Tensor, weights: Tensor) -> Tensor:
        assert (weights >= 0).all()
        probs = weights / weights.sum(1, keepdim=True)
        for earlier_nodes, tokens in self.picks:
            known = torch.nn.functional.one_hot(tokens, weights.shape[1]).to(probs.dtype)
            probs = torch.where((earlier_nodes == nodes)[:, None], known, probs)
        tokens = self._branch(probs)
        self.picks.append((nodes, tokens))
        return tokens


def exact_law(drafts: Drafts, accept: Accept) -> Law:
    """The law of `accept`'s output over all drafts and all branches."""
    sources, accepted, chances = all_branches(drafts.rows, len(drafts.weights), accept)
    return _law(drafts.pair, tree_rows(drafts.tree, sources), accepted, drafts.weights[sources] * chances)


def all_branches(
    rows: Callable[[Tensor], tuple[Tree, Tensor]], num_rows: int, accept: Accept
) -> tuple[Tensor, Accepted, Tensor]:
    """Every way that `accept` can go on each of the trees that `rows` gives by index: their indices, outcomes and chances."""
    sources = torch.arange(num_rows)
    script = torch.zeros(num_rows, 0, dtype=torch.long)
    while True:
        coins = BranchCoins(script)
        try:
            accepted = accept(*rows(sources), coins)
        except UndecidedError as undecided:
            split = (undecided.probs > 0).nonzero()
            sources, script = sources[split[:, 0]], torch.cat([script[split[:, 0]], split[:, 1:]], 1)
        else:
            return sources, accepted, coins.weights


def _law(pair: Pair, tree: Tree, accepted: Accepted, weights: Tensor) -> Law:
    assert abs(weights.sum() - 1) < 1e-12
    emitted = tree.token_ids.gather(1, accepted.path_nodes).roll(-1, 1)
    emitted = emitted.scatter(1, accepted.num_accepted[:, None] - 1, accepted.bonus[:, None])
    emitted = torch.nn.functional.pad(emitted, (0, 3))[:, :3]
    lengths = accepted.num_accepted.clamp(max=3)
    law = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for length in (1, 2, 3):
        is_long = lengths == length
        cells = emitted[is_long][:, :length].T
        part = torch.zeros((VOCABULARY,) * length, dtype=torch.float64)
        part.index_put_(tuple(cells), weights[is_long], accumulate=True)
        part = part.view(*part.shape, *(1,) * (3 - length))
        for depth in range(length, 3):
            part = part * pair.conditional(depth)
        law += part
    return Law(law, (weights * (accepted.num_accepted - 1)).sum().item())


def tree_rows(tree: Tree, indices: Tensor) -> Tree:
    """The trees at these batch rows."""
    names = ("token_ids", "parents", "depths", "ancestor_mask", "num_nodes")
    laws = tree.draft_laws
    if laws is not None:
        trials = None if laws.trial_nodes is None else laws.trial_nodes[indices]
        laws = DraftLaws(
            kind=laws.kind,
            probs=laws.probs[indices],
            law_ids=laws.law_ids[indices],
            is_drawn=laws.is_drawn[indices],
            trial_nodes=trials,
        )
    return replace(tree, draft_laws=laws, **{name: getattr(tree, name)[indices] for name in names})


@dataclass
class Draw:
    """One tree being enumerated: its tokens, node contexts, probability, and the law of each node's drawn children."""

    tokens: list[int]
    contexts: list[Context]
    weight: float
    laws: list[Sequence[float]]


@lru_cache(maxsize=64)
def draw_all(pair: Pair, shape: TreeShape, kind: DraftKind, *, drawn_first: bool = True) -> Drafts:
    """Every tree of `shape` that drafting of this kind may give.

    Deterministic children are the drafter's most probable tokens in order. A mixed tree's drawn child is its first, or its
    last, child.
    """
    is_drawn = tuple(_is_drawn(shape, node, kind, drawn_first) for node in range(shape.num_nodes))
    draws = [Draw([0], [()], 1.0, [_children_law(pair, shape, (), 0, is_drawn)])]
    for node in range(1, shape.num_nodes):
        draws = [more for draw in draws for more in _extend(pair, shape, draw, node, (kind, is_drawn))]
    target = [[pair.target(context) for context in draw.contexts] for draw in draws]
    tree = shape.tree(torch.tensor([draw.tokens for draw in draws]))
    laws = DraftLaws(
        kind=kind,
        probs=torch.tensor([draw.laws for draw in draws], dtype=torch.float64),
        law_ids=tree.parents,
        is_drawn=torch.tensor(is_drawn).expand_as(tree.token_ids),
    )
    return Drafts(
        pair,
        tree if kind is DraftKind.DETERMINISTIC else tree.with_draft_laws(laws),
        torch.tensor([draw.weight for draw in draws], dtype=torch.float64),
        torch.tensor(target, dtype=torch.float64),
    )


def _is_drawn(shape: TreeShape, node: int, kind: DraftKind, drawn_first: bool) -> bool:
    if node == 0 or kind is DraftKind.DETERMINISTIC:
        return False
    siblings = shape.children[shape.parents[node]]
    return kind is not DraftKind.MIXED or node == siblings[0 if drawn_first else -1]


@cache
def _children_law(pair: Pair, shape: TreeShape, context: Context, node: int, is_drawn: tuple[bool, ...]) -> list[float]:
    """The law of the node's drawn children: without its deterministic ones."""
    law = list(pair.draft(context))
    for token in _best_tokens(law)[: sum(not is_drawn[child] for child in shape.children[node])]:
        law[token] = 0.0
    return [value / sum(law) for value in law]


def _best_tokens(law: Sequence[float]) -> list[int]:
    return sorted(range(VOCABULARY), key=lambda token: -law[token])


def _extend(
    pair: Pair, shape: TreeShape, draw: Draw, node: int, drafting: tuple[DraftKind, tuple[bool, ...]]
) -> list[Draw]:
    kind, is_drawn = drafting
    parent = shape.parents[node]
    earlier = [sibling for sibling in shape.children[parent] if sibling < node]
    if is_drawn[node]:
        law = list(draw.laws[parent])
        if kind is DraftKind.WITHOUT_REPLACEMENT:
            for sibling in earlier:
                law[draw.tokens[sibling]] = 0.0
            law = [value / sum(law) for value in law]
        outcomes = [(token, prob) for token, prob in enumerate(law) if prob > 0]
    else:
        rank = sum(not is_drawn[sibling] for sibling in earlier)
        outcomes = [(_best_tokens(pair.draft(draw.contexts[parent]))[rank], 1.0)]
    more = []
    for token, prob in outcomes:
        context = (*draw.contexts[parent], token)
        law = _children_law(pair, shape, context, node, is_drawn)
        more.append(Draw([*draw.tokens, token], [*draw.contexts, context], draw.weight * prob, [*draw.laws, law]))
    return more
