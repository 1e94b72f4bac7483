"""Behind random words a random head knows nothing: the adaptive budget settles on plain decoding. Steps are counted, not timed."""

import random
from collections import Counter

import pytest

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.pass_times import PassTimes
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

WORDS = [
    "harbour",
    "quartz",
    "lantern",
    "mellow",
    "tundra",
    "pivot",
    "ochre",
    "saddle",
    "nimbus",
    "gravel",
    "walnut",
    "ember",
]
# Milliseconds by nodes: a pass that costs little more when it is wider, so that trees are worth trying, and one that costs much.
TIMES = {
    "wide-is-cheap": PassTimes(verify_ms={1: 20, 4: 21, 16: 24, 64: 30}, draft_ms={0: 1, 1: 1.5, 8: 2}),
    "wide-is-dear": PassTimes(verify_ms={1: 20, 4: 28, 16: 40, 64: 110}, draft_ms={0: 1.5, 1: 2, 8: 3}),
}
NUM_TOKENS, NUM_REQUESTS = 160, 2


def prompt_of(seed: int) -> tuple[int, ...]:
    """Random words as the tiny models' tokens: a byte is its number and 2 for the special ones."""
    text = " ".join(random.Random(seed).choices(WORDS, k=12))
    return tuple(2 + byte for byte in text.encode())


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
@pytest.mark.parametrize("times", TIMES)
def test_the_ladder_settles_on_plain_decoding(tiny_engine, head, times):
    executor = TorchExecutor(read_engine(tiny_engine(head)))
    tree = parse_tree("dynamic:16/2/4", executor.manifest.head_kind, num_heads=3)
    scheduler = Scheduler(executor, tree, Acceptance.MATCH, is_adaptive=True)
    ladder = scheduler._ladder
    assert ladder is not None
    ladder.reckon_with(TIMES[times])
    for index in range(NUM_REQUESTS):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=index)
        scheduler.add(Request(request_id=index, prompt_ids=prompt_of(index), sampling=sampling))
    chosen: list[str] = []
    names = dict(zip(map(id, ladder.steps), ("plain", "small", "whole"), strict=True))
    choose = ladder.steps_for

    def noted(sequences):
        groups = choose(sequences)
        chosen.extend(names[id(step)] for step, _ in groups)
        return groups

    ladder.steps_for = noted
    while scheduler.sequences:
        scheduler.step()
    counts = Counter(chosen)
    assert counts["plain"] >= 0.9 * len(chosen), counts
    # After the first doubts: plain, but for a try now and then.
    late = Counter(chosen[32:])
    assert late["whole"] == 0, late
    assert late["plain"] >= 0.9 * late.total(), late
