"""Union of trees: by hand, and the exact law of multi-step sampling over the union of two drafters' trees."""

import pytest
import torch
from exact_laws import Drafts, draw_all, exact_law, tree_rows
from toy_models import PAIRS, Context, Pair, random_law

from furcate.builder.errors import ConfigError
from furcate.decoding.acceptance.registry import RULES
from furcate.decoding.merged_tree import merge_trees
from furcate.decoding.tree import DraftKind, Tree
from furcate.decoding.tree_shape import expansion_shape, shape_from_choices


def test_union_by_hand():
    # First 9 -> 5 -> 6, 9 -> 7; second 9 -> 7 -> 8, 9 -> 5 -> 6, 9 -> 7 again, without more below.
    first = shape_from_choices([[0], [1], [0, 0]]).tree(torch.tensor([[9, 5, 7, 6]]))
    second = shape_from_choices([[0], [1], [2], [0, 0], [1, 0]]).tree(torch.tensor([[9, 7, 5, 7, 8, 6]]))
    merged = merge_trees([first, second])
    assert merged.num_nodes.tolist() == [5]
    assert merged.token_ids[0, :5].tolist() == [9, 5, 7, 6, 8]
    assert merged.parents[0].tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 0]
    assert merged.depths[0, :5].tolist() == [0, 1, 1, 2, 2]
    assert merged.max_depth == 2
    assert merged.draft_laws is None


class SecondDrafter(Pair):
    """The same target, drafted by a model that knows nothing of it."""

    def draft(self, context: Context) -> tuple[float, ...]:
        return random_law(1000 + self.seed, context)


def merged_drafts(pair: Pair, widths: list[list[int]]) -> Drafts:
    """All pairs of trees of two drafters, merged, with the target's laws after the merged nodes."""
    parts = [
        draw_all(model, expansion_shape(width), DraftKind.WITH_REPLACEMENT)
        for model, width in zip((pair, SecondDrafter(pair.seed)), widths, strict=True)
    ]
    left, right = torch.cartesian_prod(*[torch.arange(len(part.weights)) for part in parts]).T
    merged = merge_trees([tree_rows(parts[0].tree, left), tree_rows(parts[1].tree, right)])
    weights = parts[0].weights[left] * parts[1].weights[right]
    return Drafts(pair, merged, weights, torch.tensor(node_laws(pair, merged), dtype=torch.float64))


def node_laws(pair: Pair, tree: Tree) -> list[list[tuple[float, ...]]]:
    rows = []
    for tokens, parents in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        contexts: list[Context] = [()]
        for node in range(1, len(tokens)):
            contexts.append((*contexts[parents[node]], tokens[node]))
        rows.append([pair.target(context[:3]) for context in contexts])
    return rows


@pytest.mark.parametrize("widths", [[[2], [2]], [[1, 1], [1, 2]], [[2, 1], [1]]], ids=str)
def test_multi_step_over_a_merged_tree_gives_the_targets_law(widths):
    for pair in PAIRS:
        drafts = merged_drafts(pair, widths)
        law = exact_law(drafts, RULES["multi_step"].accept)
        assert law.error(pair) <= 1e-12
        alone = exact_law(
            draw_all(pair, expansion_shape(widths[0]), DraftKind.WITH_REPLACEMENT), RULES["multi_step"].accept
        )
        assert law.mean_drafts > alone.mean_drafts


def test_merging_one_tree_folds_its_repeats_and_keeps_what_comes_out():
    for pair in PAIRS:
        drafts = draw_all(pair, expansion_shape([2, 1]), DraftKind.WITH_REPLACEMENT)
        merged = merge_trees([drafts.tree])
        assert (merged.num_nodes < drafts.tree.num_nodes).any()
        target = torch.tensor(node_laws(pair, merged), dtype=torch.float64)
        folded = exact_law(Drafts(pair, merged, drafts.weights, target), RULES["multi_step"].accept)
        whole = exact_law(drafts, RULES["multi_step"].accept)
        assert folded.error(pair) <= 1e-12
        assert folded.mean_drafts >= whole.mean_drafts - 1e-12


def test_trees_that_cannot_be_merged_exactly_are_refused():
    drawn = draw_all(PAIRS[0], expansion_shape([1]), DraftKind.WITHOUT_REPLACEMENT).tree
    with pytest.raises(ConfigError, match="without replacement cannot be merged"):
        merge_trees([drawn, drawn])
