"""Shapes that are computed from numbers on the command line."""

import pytest

from furcate.builder.errors import ConfigError
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import TreeKind, parse_tree, tree_config_from_json


def test_expansion_gives_every_node_of_a_depth_equally_many_children():
    tree = parse_tree("expansion:1,2,1", HeadKind.EAGLE3)
    assert tree.kind is TreeKind.STATIC
    assert tree.choices == ((0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0))
    assert (tree.budget, tree.max_depth, str(tree)) == (6, 3, "expansion:1,2,1")


def test_cartesian_takes_as_many_candidates_of_each_depth_and_expands_all_of_them():
    tree = parse_tree("cartesian:4,3,2/16", HeadKind.MEDUSA, num_heads=3)
    assert tree.kind is TreeKind.DYNAMIC
    assert (tree.budget, tree.max_depth, tree.levels) == (16, 3, ((4, 4), (3, 12), (2, 24)))
    assert parse_tree("cartesian:2,2", HeadKind.EAGLE).budget == 7
    assert tree_config_from_json(tree.to_json()) == tree


def test_accuracies_give_the_most_probable_nodes(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text("[[0.6, 0.2, 0.1], [0.5, 0.1]]")
    tree = parse_tree(f"accuracies:{file}/5", HeadKind.MEDUSA, num_heads=3)
    # 0.6, 0.3 and 0.2, then 0.1 twice: of equals the one that comes first in the alphabet of paths.
    assert tree.choices == ((0,), (1,), (0, 0), (1, 0))
    assert tree.budget == 5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("expansion:", "malformed; write it like expansion:1,1,3,1,1"),
        ("expansion:0,2", "malformed"),
        ("expansion:10,10,10", "more than 128 nodes"),
        ("cartesian:4,x/16", "malformed; write it like cartesian:4,3,2/16"),
        ("cartesian:4,3/0", "malformed"),
        ("cartesian:12,12,12/16", "more than 128 nodes"),
        ("accuracies:nowhere.json", "malformed; write it like accuracies:measured.json/32"),
        ("accuracies:nowhere.json/8", "cannot be read"),
    ],
)
def test_malformed_shapes_are_refused(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_tree(text, HeadKind.EAGLE3)


@pytest.mark.parametrize("content", ["{}", "[]", "[[1.5]]", '[["a"]]', "[[]]"])
def test_a_file_that_holds_no_accuracies_is_refused(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match="must hold a list per depth of chances from 0 to 1"):
        parse_tree(f"accuracies:{tmp_path / 'bad.json'}/8", HeadKind.EAGLE3)
