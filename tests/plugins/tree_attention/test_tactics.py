"""The choice of blocks and splits."""

import pytest

from furcate.builder.errors import ConfigError
from furcate.plugins.chips import CHIPS
from furcate.plugins.tree_attention.spec import HEAD_DIMS
from furcate.plugins.tree_attention.tactics import PLUGIN_TACTICS, TACTICS, choose_splits, choose_tactic, fitting_lines


@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_supported_call_has_a_tactic(arch, head_dim, element_bytes):
    sizes = [choose_tactic(arch, rows, head_dim, element_bytes).block_m for rows in (1, 16, 17, 32, 33, 64, 65, 4096)]
    assert sizes == sorted(sizes)


def test_more_rows_take_wider_blocks_on_hopper():
    assert [choose_tactic(90, rows, 128, 2).block_m for rows in (16, 17, 33, 64, 65)] == [16, 32, 64, 64, 128]


def test_every_line_is_reached():
    for table in (TACTICS, PLUGIN_TACTICS):
        reached = {
            id(line)
            for arch in CHIPS
            for head_dim in HEAD_DIMS
            for size in (2, 4)
            for line in fitting_lines(table, arch, head_dim, size)
        }
        assert reached == {id(line) for line in table}


def test_too_wide_heads_are_refused():
    with pytest.raises(ConfigError, match="head_dim 512 with 2-byte"):
        choose_tactic(90, 1, 512, 2)


@pytest.mark.parametrize(
    ("num_ctas", "num_keys", "splits"),
    [
        (64, 8192, 4),  # one round of 256 CTAs
        (192, 8192, 4),  # three rounds of quarters instead of one round with 72 of 264 slots idle
        (8, 32768, 33),  # one sequence, long: all the slots
        (8, 8192, 33),
        (8, 192, 1),  # a prefix of three blocks is not worth two partial results
        (4096, 8192, 1),
    ],
)
def test_splits_fill_the_chip(num_ctas, num_keys, splits):
    """264 slots: 132 SMs with two CTAs each."""
    tactic = choose_tactic(90, 64, 128, 2)
    assert choose_splits(num_ctas, 264, num_keys, tactic) == splits
