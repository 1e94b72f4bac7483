"""The step on tiny random models: whatever is drafted, the text is what plain decoding gives."""

import pytest
import torch

from furcate.builder.engine import read_engine
from furcate.builder.network.spec import HeadKind
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import FinishReason, Request, SamplingParams
from furcate.decoding.scheduler import Scheduler

TREES = {
    "eagle3": ["single", "chain:1", "chain:5", "dynamic:12/3/3", "dynamic:60/7/10", "mc_sim_7b_63"],
    "eagle": ["single", "chain:4", "dynamic:16/4/4", "mc_sim_7b_63"],
    "medusa": ["single", "chain:3", "dynamic:20/2/5"],
}
CASES = [(head, tree) for head, trees in TREES.items() for tree in trees]


def prompts(count: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 2, 17, 40, 5, 33, 64, 3][:count]
    return [tuple(torch.randint(2, 258, (length,), generator=generator).tolist()) for length in lengths]


def run_all(scheduler: Scheduler, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    """Texts of all requests, run together; the pool is empty afterwards."""
    for request in requests:
        scheduler.add(request)
    texts: dict[int, tuple[int, ...]] = {request.request_id: () for request in requests}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
        assert scheduler.num_allocated_pages == scheduler.num_committed_pages
    assert scheduler.num_allocated_pages == 0
    assert scheduler.pool.num_promised == 0
    return texts


def requests_of(params: list[SamplingParams]) -> list[Request]:
    pairs = zip(prompts(len(params)), params, strict=True)
    return [
        Request(request_id=index, prompt_ids=prompt, sampling=sampling)
        for index, (prompt, sampling) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def executors(tiny_engine) -> dict[str, TorchExecutor]:
    return {head: TorchExecutor(read_engine(tiny_engine(head))) for head in TREES}


def scheduler_of(executor: TorchExecutor, tree: str) -> Scheduler:
    kind = executor.head.kind if executor.head is not None else None
    return Scheduler(executor, parse_tree(tree, kind, num_heads=4 if kind is HeadKind.MEDUSA else 0))


def plain_texts(executor: TorchExecutor, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    texts = {}
    for request in requests:
        texts |= run_all(scheduler_of(executor, "single"), [request])
    return texts


@pytest.mark.parametrize(("head", "tree"), CASES)
def test_greedy_text_of_a_batch_equals_plain_decoding_of_each_row_alone(executors, head, tree):
    executor = executors[head]
    requests = requests_of([SamplingParams(max_tokens=length) for length in (40, 7, 1, 23, 30)])
    assert run_all(scheduler_of(executor, tree), requests) == plain_texts(executor, requests)


@pytest.mark.parametrize(
    ("head", "tree"), [("eagle3", "dynamic:12/3/3"), ("eagle", "mc_sim_7b_63"), ("medusa", "chain:3")]
)
def test_seeded_text_is_the_same_alone_in_company_and_without_speculation(executors, head, tree):
    executor = executors[head]
    params = [
        SamplingParams(max_tokens=24, temperature=0.7, seed=1),
        SamplingParams(max_tokens=24, temperature=1.3, top_k=5, seed=2**64 - 1),
        SamplingParams(max_tokens=24, temperature=1.0, top_p=0.8, seed=3),
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.9, top_k=40, top_p=0.9, seed=4),
    ]
    requests = requests_of(params)
    together = run_all(scheduler_of(executor, tree), requests)
    alone = {}
    for request in requests:
        alone |= run_all(scheduler_of(executor, tree), [request])
    assert together == alone
    assert together == plain_texts(executor, requests)


def test_different_seeds_give_different_texts(executors):
    requests = [
        Request(
            request_id=seed, prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
        )
        for seed in range(4)
    ]
    texts = run_all(scheduler_of(executors["eagle3"], "chain:2"), requests)
    assert len(set(texts.values())) == 4


@pytest.mark.parametrize("tree", ["single", "dynamic:60/7/10"])
def test_the_text_ends_with_the_end_id_wherever_it_falls_in_a_path(executors, tree):
    executor = executors["eagle3"]
    (whole,) = plain_texts(executor, requests_of([SamplingParams(max_tokens=40)])).values()
    for cut in (0, 1, 2, 7, 20):
        end = whole[cut]
        expected = whole[: whole.index(end) + 1]
        request = requests_of([SamplingParams(max_tokens=40, end_ids=(end,))])
        assert run_all(scheduler_of(executor, tree), request)[0] == expected


@pytest.mark.parametrize("tree", ["single", "dynamic:60/7/10"])
def test_a_stop_sequence_is_cut_off_and_never_emitted_in_part(executors, tree):
    executor = executors["eagle3"]
    (whole,) = plain_texts(executor, requests_of([SamplingParams(max_tokens=40)])).values()
    for start, length in ((0, 1), (3, 2), (11, 3)):
        stop = whole[start : start + length]
        first = next(i for i in range(len(whole)) if whole[i : i + length] == stop)
        scheduler = scheduler_of(executor, tree)
        scheduler.add(*requests_of([SamplingParams(max_tokens=40, stop_sequences=(stop,))]))
        emitted: tuple[int, ...] = ()
        reason = None
        while scheduler.sequences:
            (output,) = scheduler.step()
            emitted += output.token_ids
            assert emitted == whole[: len(emitted)]
            reason = output.finish_reason
        assert emitted == whole[:first]
        assert reason is FinishReason.STOP
        assert output.stats.num_emitted_tokens == first


def test_max_tokens_cuts_inside_an_accepted_path(executors):
    executor = executors["eagle3"]
    (whole,) = plain_texts(executor, requests_of([SamplingParams(max_tokens=12)])).values()
    for limit in range(1, 13):
        text = run_all(scheduler_of(executor, "dynamic:60/7/10"), requests_of([SamplingParams(max_tokens=limit)]))[0]
        assert text == whole[:limit]


def test_cancelling_frees_pages_at_once_and_leaves_the_others_alone(executors):
    executor = executors["eagle3"]
    requests = requests_of([SamplingParams(max_tokens=30)] * 3)
    expected = plain_texts(executor, requests)
    scheduler = scheduler_of(executor, "dynamic:12/3/3")
    for request in requests:
        scheduler.add(request)
    texts = {request.request_id: () for request in requests}
    for step in range(100):
        if step == 4:
            before = scheduler.num_allocated_pages
            scheduler.cancel(1)
            scheduler.cancel(99)
            assert scheduler.num_allocated_pages < before
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
        if not scheduler.sequences:
            break
    assert texts[0] == expected[0]
    assert texts[2] == expected[2]
    assert texts[1] == expected[1][: len(texts[1])]


def test_requests_wait_in_order_when_the_pool_is_short_and_all_finish(tiny_engine):
    engine = tiny_engine("eagle3", max_pool_tokens=192, max_context_tokens=150, tree="dynamic:12/3/3")
    scheduler = Scheduler.from_engine(engine)
    requests = requests_of([SamplingParams(max_tokens=40)] * 5)
    for request in requests:
        scheduler.add(request)
    first_token_order = []
    while scheduler.sequences:
        for output in scheduler.step():
            if output.stats.num_emitted_tokens and output.request_id not in first_token_order:
                first_token_order.append(output.request_id)
            assert scheduler.num_allocated_pages <= scheduler.num_pages
    assert first_token_order == sorted(first_token_order)
    assert len(first_token_order) == 5


def test_a_long_prompt_is_taken_in_chunks_while_others_run(tiny_engine):
    engine = tiny_engine("eagle3", prefill_chunk_tokens=16, tree="dynamic:12/3/3")
    scheduler = Scheduler.from_engine(engine)
    long_prompt = tuple(range(2, 202))
    scheduler.add(Request(request_id=1, prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=60)))
    scheduler.step()
    scheduler.add(Request(request_id=2, prompt_ids=long_prompt, sampling=SamplingParams(max_tokens=5)))
    running_tokens = 0
    while not scheduler.sequences[2].is_prefilled:
        outputs = {output.request_id: output for output in scheduler.step()}
        running_tokens += len(outputs[1].token_ids)
    assert running_tokens >= 200 // 16
    while 2 in scheduler.sequences:
        scheduler.step()


def test_chunks_do_not_change_the_text(tiny_engine):
    texts = set()
    for chunk in (1, 7, 16, 256):
        scheduler = Scheduler.from_engine(tiny_engine("eagle3", prefill_chunk_tokens=chunk, tree="dynamic:12/3/3"))
        request = Request(request_id=0, prompt_ids=tuple(range(2, 72)), sampling=SamplingParams(max_tokens=20))
        texts.add(run_all(scheduler, [request])[0])
    assert len(texts) == 1


def test_every_tree_accepts_what_a_perfect_head_drafts(tiny_target, tiny_engine):
    """A target that drafts for itself: the Medusa state is ignored, so a chain of its own greedy tokens stands in."""
    executor = TorchExecutor(read_engine(tiny_engine("eagle3")))
    requests = requests_of([SamplingParams(max_tokens=21)])
    (text,) = plain_texts(executor, requests).values()
    scheduler = scheduler_of(executor, "chain:4")
    script = list(text)

    class Scripted:
        """Drafts the tokens that plain decoding is known to give."""

        def start(self, rows):
            position = int(rows.cache_lengths[0]) - len(requests[0].prompt_ids) + 1
            return ScriptedDraft(script[position:] + [0] * 8)

        def observe(self, committed):
            return committed.features[:, 0]

    class ScriptedDraft:
        def __init__(self, tokens):
            self.tokens = tokens
            self.level = 0

        def propose(self, num_children):
            from furcate.decoding.drafters.proposer import Proposal

            return Proposal(log_probs=torch.zeros(1, 1, 1), token_ids=torch.tensor([[[self.tokens[self.level]]]]))

        def descend(self, parents, token_ids):
            self.level += 1

    scheduler._step.proposer = Scripted()
    scheduler.add(requests[0])
    steps, emitted = 0, ()
    while scheduler.sequences:
        (output,) = scheduler.step()
        emitted += output.token_ids
        steps = output.stats.num_target_steps
    assert emitted == text
    assert steps == 4
    assert output.stats.num_accepted_draft_tokens == 16
