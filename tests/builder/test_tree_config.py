"""What `--tree` accepts, and the sentence it answers otherwise."""

import pytest

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeConfig, parse_tree, shipped_choice_names, tree_config_from_json
from furcate.decoding.drafters.grow import grower_of

EAGLE = HeadKind.EAGLE3


@pytest.mark.parametrize(
    ("text", "budget", "max_depth"),
    [
        ("single", 1, 0),
        ("chain:1", 2, 1),
        ("chain:5", 6, 5),
        ("dynamic:60/7/10", 60, 8),
        ("dynamic:1/0/1", 1, 1),
        ("auto", 16, 5),
    ],
)
def test_budget_counts_the_root_and_depth_is_the_deepest_possible_node(text, budget, max_depth):
    config = parse_tree(text, EAGLE)
    assert (config.budget, config.max_depth) == (budget, max_depth)
    assert grower_of(config).num_nodes == budget


def test_a_budget_beyond_what_depth_and_top_k_allow_shrinks_to_it():
    assert parse_tree("dynamic:100/0/3", EAGLE).budget == 4
    assert parse_tree("dynamic:100/1/3", EAGLE).budget == 1 + 3 + 9


@pytest.mark.parametrize("name", shipped_choice_names())
def test_every_shipped_choice_list_is_a_tree(name):
    config = parse_tree(name, EAGLE)
    grower = grower_of(config)
    assert grower.num_nodes == config.budget == len(config.choices) + 1
    assert grower.max_depth == config.max_depth


def test_json_choices_are_read_and_recorded(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("[[0], [1], [0, 0]]")
    config = parse_tree(str(path), EAGLE)
    assert config.choices == ((0,), (1,), (0, 0))
    assert tree_config_from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "head", "sentence"),
    [
        ("bushy", EAGLE, "tree 'bushy' is not known; use auto, dynamic:BUDGET/DEPTH/TOPK, chain:LENGTH, single"),
        ("chain:0", EAGLE, "tree 'chain:0' is malformed; write it like chain:5"),
        ("chain:x", EAGLE, "tree 'chain:x' is malformed"),
        ("dynamic:60/7", EAGLE, "tree 'dynamic:60/7' is malformed; write it like dynamic:60/7/10"),
        ("dynamic:0/7/10", EAGLE, "malformed"),
        ("dynamic:500/7/10", EAGLE, "has 500 nodes with its root; at most 128 are allowed"),
        ("chain:200", EAGLE, "has 201 nodes"),
        ("chain:5", None, "needs a head, and there is none; give --head, or --tree single"),
        ("chain:4", HeadKind.MEDUSA, "is 4 deep, and the head has 3 heads; use length 3"),
        ("dynamic:20/4/4", HeadKind.MEDUSA, "is 5 deep, and the head has 3 heads; use depth 2"),
        ("mc_sim_7b_63", HeadKind.MEDUSA, "is 4 deep, and the head has 3 heads; choose a shallower one"),
        ("nowhere.json", EAGLE, "choices file nowhere.json cannot be read: No such file or directory"),
    ],
)
def test_what_is_not_a_tree_is_refused_in_one_sentence(text, head, sentence):
    with pytest.raises(ConfigError) as error:
        parse_tree(text, head, num_heads=3)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("{}", "must hold a list of lists of ranks"),
        ("[[0, 0]]", "hold [0, 0] but not its parent [0]; add the parent"),
        ("[[-1]]", "ranks >= 0"),
        ("[]", "non-empty paths"),
    ],
)
def test_choices_that_are_no_tree_are_refused(tmp_path, content, sentence):
    path = tmp_path / "choices.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        parse_tree(str(path), EAGLE)
    assert sentence in str(error.value)


def test_a_config_names_itself_as_it_was_asked_for():
    for text in ("single", "chain:5", "dynamic:60/7/10", "mc_sim_7b_63"):
        config = parse_tree(text, EAGLE)
        assert str(config) == text
        assert isinstance(config, TreeConfig)
