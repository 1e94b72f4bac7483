"""Endings inside one accepted path: the first one counts, nothing behind it is emitted, and tau counts what was."""

from itertools import pairwise

import pytest

from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import parse_tree
from furcate.decoding.endings import Ending
from furcate.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from furcate.decoding.scheduler import Scheduler

PATH = [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("sampling", "emitted", "reason"),
    [
        (SamplingParams(max_tokens=5, stop_sequences=((13,),)), (10, 11, 12), FinishReason.STOP),
        (SamplingParams(max_tokens=5, stop_sequences=((13, 14),)), (10, 11, 12), FinishReason.STOP),
        (SamplingParams(max_tokens=5, stop_sequences=((14, 15),)), (10, 11, 12, 13, 14), FinishReason.LENGTH),
        (SamplingParams(max_tokens=5, end_ids=(12,), stop_sequences=((13,),)), (10, 11, 12), FinishReason.END_ID),
        (SamplingParams(max_tokens=3, end_ids=(13,), stop_sequences=((14,),)), (10, 11, 12), FinishReason.LENGTH),
        (SamplingParams(max_tokens=3, end_ids=(12,)), (10, 11, 12), FinishReason.END_ID),
    ],
)
def test_of_several_endings_in_a_path_the_first_counts(sampling, emitted, reason):
    ending = Ending(sampling)
    assert ending.take(PATH) == emitted
    assert ending.reason is reason
    assert len(ending.token_ids) == len(emitted)


def last_output(executor, sampling: SamplingParams, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, ...], StepOutput]:
    """A greedy text with a chain of six drafts, and its last output."""
    scheduler = Scheduler(executor, parse_tree("chain:6", HeadKind.MODEL))
    scheduler.add(Request(request_id=0, prompt_ids=prompt_ids, sampling=sampling))
    text: tuple[int, ...] = ()
    while scheduler.sequences:
        (output,) = scheduler.step()
        text += output.token_ids
    return text, output


def test_stop_before_the_limit_in_a_path_of_six_is_a_stop_and_tau_counts_what_was_emitted(model_executors):
    """The target drafts for itself, so the first step accepts all six: a stop behind three tokens, a limit of five."""
    executor, prompt = model_executors["itself"], tuple(range(5, 25))
    whole, output = last_output(executor, SamplingParams(max_tokens=8), prompt)
    assert output.stats.num_target_steps == 1
    assert output.stats.num_accepted_draft_tokens == 6
    stop = whole[4:6]
    assert stop not in pairwise(whole[:5]), "the stop must come first where it is meant to"
    # One token is the prompt's: the step gives three more, then the stop.
    text, output = last_output(executor, SamplingParams(max_tokens=6, stop_sequences=(stop,)), prompt)
    assert text == whole[:4]
    assert output.finish_reason is FinishReason.STOP
    assert output.stats.num_emitted_tokens == 4
    assert output.stats.num_accepted_draft_tokens == 3
    assert output.stats.tau == 3.0
