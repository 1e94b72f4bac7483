"""EAGLE-2's growth and reranking: hand-computed values, closure under ties and NaN, ragged rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.decoding.dynamic_tree import Candidates, expand_level, rerank

NAN, INF = float("nan"), float("inf")


def test_expansion_by_hand():
    level = expand_level(torch.tensor([[-1.0, -2.0]]), torch.tensor([[[-0.5, -3.0], [-0.1, -0.2]]]), width=2)
    assert torch.allclose(level.candidate_scores, torch.tensor([[-1.5, -4.0, -2.1, -2.2]]))
    assert level.chosen.tolist() == [[0, 2]]
    assert torch.allclose(level.scores, torch.tensor([[-1.5, -2.1]]))


def test_expansion_orders_ties_by_index_and_puts_nan_last():
    level = expand_level(torch.zeros(1, 2), torch.tensor([[[-1.0, NAN, -1.0], [INF, -1.0, -INF]]]), width=6)
    assert level.chosen.tolist() == [[3, 0, 2, 4, 1, 5]]
    assert level.scores.tolist() == [[0, -1, -1, -1, -INF, -INF]]


def test_rerank_by_hand():
    # Candidates: 0, 1 below the root; 2, 3 below candidate 0; 4 below candidate 1.
    candidates = Candidates(
        token_ids=torch.tensor([[10, 11, 12, 13, 14]]),
        scores=torch.tensor([[-1.0, -3.0, -1.5, -2.0, -3.5]]),
        parents=torch.tensor([[0, 0, 1, 1, 2]]),
    )
    kept = rerank(torch.tensor([9]), candidates, budget=4, max_depth=2)
    assert kept.tree.token_ids.tolist() == [[9, 10, 12, 13]]
    assert kept.tree.parents.tolist() == [[0, 0, 1, 1]]
    assert kept.tree.depths.tolist() == [[0, 1, 2, 2]]
    assert kept.sources.tolist() == [[0, 1, 3, 4]]


def test_dead_candidates_become_padding_with_all_below_them():
    candidates = Candidates(
        token_ids=torch.tensor([[10, 11, 12], [10, 11, 12]]),
        scores=torch.tensor([[NAN, -1.0, -0.5], [-1.0, -2.0, -3.0]]),
        parents=torch.tensor([[0, 0, 1], [0, 0, 1]]),
    )
    tree = rerank(torch.tensor([9, 9]), candidates, budget=8, max_depth=2).tree
    assert tree.num_nodes.tolist() == [2, 4]
    assert tree.token_ids[0, :2].tolist() == [9, 11]
    assert tree.parents.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert not tree.ancestor_mask[0, 2:].any()
    assert not tree.ancestor_mask[0, :, 2:].any()


def test_a_budget_of_one_keeps_the_root():
    candidates = Candidates(
        token_ids=torch.tensor([[3]]), scores=torch.tensor([[-1.0]]), parents=torch.zeros(1, 1, dtype=torch.long)
    )
    tree = rerank(torch.tensor([9]), candidates, budget=1, max_depth=1).tree
    assert tree.token_ids.tolist() == [[9]]
    assert tree.num_nodes.tolist() == [1]


scores = st.sampled_from([0.0, -1.0, -1.0, -2.0, -INF, NAN, 3.0])


@given(st.lists(st.tuples(scores, st.integers(0, 10**6)), min_size=1, max_size=25), st.integers(1, 30))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_trees_are_closed_ordered_and_best_whatever_the_scores(drawn, budget):
    parents = [pick % (index + 1) for index, (_, pick) in enumerate(drawn)]
    values = [value for value, _ in drawn]
    candidates = Candidates(
        token_ids=torch.arange(100, 100 + len(drawn))[None],
        scores=torch.tensor([values]),
        parents=torch.tensor([parents]),
    )
    kept = rerank(torch.tensor([9]), candidates, budget, max_depth=len(drawn))
    tree, num_nodes = kept.tree, int(kept.tree.num_nodes)
    sources = kept.sources[0, :num_nodes].tolist()
    assert sources == sorted(set(sources))
    assert sources[0] == 0
    for node in range(1, num_nodes):
        above = int(tree.parents[0, node])
        assert above < node
        assert sources[above] == parents[sources[node] - 1]
    assert not tree.parents[0, num_nodes:].any()

    effective: list[float] = []
    for value, parent in zip(values, parents, strict=True):
        value = -INF if value != value else value
        effective.append(value if parent == 0 else min(value, effective[parent - 1]))
    best = sorted((value for value in effective if value > -INF), reverse=True)[: budget - 1]
    assert sorted((effective[source - 1] for source in sources[1:]), reverse=True) == best
