"""Top-down rejection: offer a node's children one after another, and move into the first that is accepted.

B batch rows, V vocabulary. With P the target's law at the node and Q the law of the next draw, child x is accepted with
probability min(1, P[x] / Q[x]); a rejection leaves P = norm((P - Q)+) for the children after it and for the bonus.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.decoding.acceptance.accepted import Accepted, accept_path_to
from furcate.decoding.acceptance.order import TINY, Trials, entries, select_rows, strike, table_rows, trials_of
from furcate.decoding.acceptance.rule import Coins, check_tree
from furcate.decoding.tree import DraftKind, Tree


class MultiStep:
    """Multi-step speculative sampling, for independent draws from one or several drafters (SpecInfer, arXiv 2305.09781).

    Every draw is one trial with its own drafter's law. Repeats are offered as often as they were drawn: offering them once
    would bias the text.
    """

    name = "multi_step"
    is_lossless = True
    kinds = frozenset({DraftKind.WITH_REPLACEMENT})

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`."""
        check_tree(self, tree)
        return _walk(tree, target, coins, has_replacement=True)


class RecursiveRejection:
    """Recursive rejection sampling without replacement (Sequoia, arXiv 2402.12374).

    After a rejection the token is struck from Q too, as it was when the next child was drawn.
    """

    name = "recursive"
    is_lossless = True
    kinds = frozenset({DraftKind.WITHOUT_REPLACEMENT})

    def accept(self, tree: Tree, target: Float[Tensor, "B N V"], coins: Coins) -> Accepted:
        """See `AcceptanceRule`."""
        check_tree(self, tree)
        return _walk(tree, target, coins, has_replacement=False)


def _walk(tree: Tree, target: Float[Tensor, "B N V"], coins: Coins, *, has_replacement: bool) -> Accepted:
    assert tree.draft_laws is not None
    laws, trials = tree.draft_laws.probs, trials_of(tree)
    nodes = torch.zeros_like(tree.num_nodes)
    trial = trials.first[:, 0]
    P, Q = target[:, 0], _law_of(laws, trials, trial)
    for _ in range(tree.max_trials):
        if trial.device.type == "cpu" and not trial.any():
            break  # a look is free on a CPU; a captured graph makes every trial
        children = trials.nodes.gather(1, trial[:, None]).squeeze(1)
        tokens = tree.token_ids.gather(1, children[:, None]).squeeze(1)
        is_trial = trial > 0
        chances = (entries(P, tokens) / entries(Q, tokens).clamp(min=TINY)).clamp(max=1) * is_trial
        is_accepted = coins.flip(trial, chances)
        residual, total = residual_law(P, Q)
        is_residual = is_trial & ~is_accepted & (total > 0)
        nodes = torch.where(is_accepted, children, nodes)
        P = select_rows(is_accepted, table_rows(target, nodes), select_rows(is_residual, residual, P))
        struck = Q if has_replacement else strike(Q, tokens)
        trial = torch.where(is_accepted, entries(trials.first, children), entries(trials.next, trial))
        fresh = _law_of(laws, trials, trial)
        Q = fresh if has_replacement else select_rows(is_accepted, fresh, struck)
    return accept_path_to(tree, nodes, coins.pick(nodes, P))


def _law_of(laws: Float[Tensor, "B L V"], trials: Trials, trial: Int64[Tensor, " B"]) -> Float[Tensor, "B V"]:
    return table_rows(laws, trials.law_ids.gather(1, trial[:, None]).squeeze(1))


def residual_law(P: Float[Tensor, "B V"], Q: Float[Tensor, "B V"]) -> tuple[Float[Tensor, "B V"], Float[Tensor, " B"]]:
    """norm((P - Q)+), and the total before normalising. Where that is 0 so is the law."""
    excess = (P - Q).clamp_(min=0)
    total = excess.sum(1)
    return excess.div_(total.clamp(min=TINY)[:, None]), total
