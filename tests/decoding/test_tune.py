"""Tuning: what it measures, what it picks, and how it is recorded."""

import json

import pytest
import torch

from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError, EngineMismatch
from furcate.decoding.pass_times import interpolated
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.tree_shape import shape_from_choices
from furcate.decoding.tune import TuneConfig, tune
from furcate.decoding.tune_ranks import NO_RANK, Ranks, accepted_drafts
from furcate.decoding.tune_report import draw_curves, print_tuning


def test_times_between_and_beyond_measured_sizes_follow_their_line():
    table = {1: 10.0, 4: 16.0, 8: 20.0}
    assert [interpolated(table, size) for size in (1, 2, 4, 6, 8, 12)] == [10, 12, 16, 18, 20, 24]
    assert interpolated({3: 5.0}, 9) == 5.0


def test_accepted_drafts_are_counted_along_the_one_path_that_is_right():
    tree = shape_from_choices([[0], [1], [0, 0], [1, 0], [1, 0, 0]]).tree(torch.tensor([[9, 4, 5, 6, 7, 8]]))
    assert accepted_drafts(tree, [5, 7, 8, 1]) == 3
    assert accepted_drafts(tree, [4, 7]) == 1
    assert accepted_drafts(tree, [6]) == 0
    assert accepted_drafts(tree, []) == 0


RANKS = [[0, 1], [NO_RANK], [1, 0], [0, NO_RANK], [0, 0], [0]]
"""Of a text of seven tokens: at each but the last, the ranks of the next two, as far as the drafter had them."""


def test_rates_count_every_place_alike():
    assert Ranks(max_depth=2, num_ranks=2, texts=[RANKS]).rates() == [[4 / 6, 1 / 6], [2 / 4, 1 / 4]]


@pytest.mark.parametrize(
    ("choices", "tau"),
    [
        ([(0,)], 7 / 4),  # steps at 0, 2, 3, 5 accept 1, 0, 1, 1
        ([(0,), (1,)], 6 / 3),  # at 0, 2, 4: 1 each
        (
            [(0,), (1,), (0, 0), (0, 1), (1, 0)],
            5 / 2,
        ),  # at 0 and 3: 2, 1; a step at 5 the end of the text may cut short
        ([(1,)], 6 / 5),  # at 0, 1, 2, 4, 5: that at 2 accepts
    ],
)
def test_predicted_tau_is_that_of_steps_that_begin_where_the_last_one_ended(choices, tau):
    ranks = Ranks(max_depth=2, num_ranks=2, texts=[RANKS])
    assert ranks.tau_of(shape_from_choices(choices)) == pytest.approx(tau)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": list(range(5, 5 + n))}) + "\n" for n in (3, 20)))
    return path


def test_a_perfect_drafter_gives_rates_of_one_and_the_choice_is_recorded(tiny_target, engine_with, prompts, tmp_path):
    path = engine_with(tiny_target, name="to-tune")
    before = read_engine(path).manifest
    config = TuneConfig(engine=path, prompts=prompts, max_tokens=12, max_depth=3)
    tuning = tune(config)
    assert [row[0] for row in tuning.rank_rates] == [1.0, 1.0, 1.0]
    assert all(ms > 0 for ms in tuning.times.verify_ms.values())
    chains = {str(c.tree): c for c in tuning.candidates if c.family == "chain"}
    assert chains["chain:3"].predicted_tau == 4
    # Two texts of 12 tokens, one from the prompt: 11 in 3 steps, as every chain of 3 is accepted whole.
    assert chains["chain:3"].measured_tau in (None, pytest.approx(22 / 6))
    run = [c for c in tuning.candidates if c.measured_ratio is not None]
    assert tuning.chosen.measured_ratio == max(c.measured_ratio for c in run)
    assert {c.family for c in run} == {"plain", "chain", "sequoia", "dynamic"}

    after = read_engine(path).manifest
    assert after.tree == tuning.chosen.tree
    assert after.tuning == json.loads(json.dumps(tuning.to_json()))
    assert after.files.keys() == before.files.keys()
    assert {name for name in after.files if after.files[name] != before.files[name]} <= {"config.json"}
    assert Scheduler.from_engine(path).manifest.tree == tuning.chosen.tree
    print_tuning(tuning)
    draw_curves(tuning, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_records_nothing_and_medusas_depth_is_its_heads(tiny_engine, prompts):
    path = tiny_engine("medusa")
    text = (path / "manifest.json").read_text()
    tuning = tune(TuneConfig(engine=path, prompts=prompts, max_tokens=8, dry_run=True))
    assert (path / "manifest.json").read_text() == text
    assert max(c.tree.max_depth for c in tuning.candidates) == 3
    assert len(tuning.rank_rates) == 3


def test_an_engine_without_a_head_is_refused(tiny_engine, prompts):
    with pytest.raises(ConfigError, match="has no head, so there is no tree to tune"):
        tune(TuneConfig(engine=tiny_engine(None), prompts=prompts))
    with pytest.raises(EngineMismatch, match="there is no engine directory"):
        tune(TuneConfig(engine=prompts.parent / "nothing", prompts=prompts))
