"""Captured steps, on a machine without a GPU: bucket choice, rows that are filled up, buffers.

A capture is played by running the program again into the tensors of its first result, which is what a CUDA graph does.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from step_rows import CASES, rows_of
from torch import Tensor
from torch_runtime import TorchRuntime, as_tensorrt_engine

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.graphs import cuda_capture
from furcate.decoding.executors.tensorrt import TensorRTExecutor
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.step import Step
from furcate.decoding.step_graphs import MAX_GRAPHS, StepGraphs

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=11, returns_log_probs=True),
    "drawn": SamplingParams(max_tokens=11, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=3),
}


def replayed(program: Callable, warm_up: Callable) -> tuple[Callable[[], None], object]:
    """A capture without a GPU: the program again, its results written where the first ones lie."""
    warm_up()
    result = program()

    def replay() -> None:
        for name, value in vars(program()).items():
            if isinstance(value, Tensor):
                getattr(result, name).copy_(value)

    return replay, result


def graphs_of(executor, step: Step, capture=replayed) -> StepGraphs:
    return StepGraphs(executor, step.run_uncaptured, (1, 2, 4), step.num_slots, capture)


def texts(
    executor, tree: str, acceptance: Acceptance, is_captured: bool, capture=replayed
) -> tuple[dict, StepGraphs | None]:
    """The tokens of every step of four requests that come one after the other, and the graphs that ran them."""
    head = executor.head
    config = parse_tree(tree, head.kind if head else None, num_heads=head.num_heads if head else 0)
    scheduler = Scheduler(executor, config, acceptance)
    graphs = graphs_of(executor, scheduler._step, capture) if is_captured else None
    scheduler._step.graphs = graphs
    generator = torch.Generator().manual_seed(7)
    out: dict[int, list] = {}
    for index, (length, name) in enumerate(((40, "greedy"), (3, "drawn"), (65, "greedy"), (9, "drawn"))):
        prompt = tuple(torch.randint(2, 258, (length,), generator=generator).tolist())
        scheduler.add(Request(request_id=index, prompt_ids=prompt, sampling=SAMPLINGS[name]))
        out[index] = []
        for output in scheduler.step():
            out[output.request_id].append(output.token_ids)
    while scheduler.sequences:
        for output in scheduler.step():
            out[output.request_id].append(output.token_ids)
    return out, graphs


@pytest.mark.parametrize(("head", "tree", "acceptance"), CASES)
def test_captured_steps_of_filled_up_batches_give_the_same_steps(tiny_engine, head, tree, acceptance):
    executor = TorchExecutor(read_engine(tiny_engine(head, max_batch_size=4)))
    expected, _ = texts(executor, tree, acceptance, is_captured=False)
    executor = TorchExecutor(read_engine(tiny_engine(head, max_batch_size=4)))
    captured, graphs = texts(executor, tree, acceptance, is_captured=True)
    assert captured == expected
    assert graphs is not None
    assert {variant.batch for variant in graphs.captured} >= {1, 4}, "three rows ran in the program of four"
    assert {variant.is_greedy for variant in graphs.captured} == {True, False}


@pytest.mark.gpu
@pytest.mark.parametrize(("head", "tree", "acceptance"), [
    ("eagle3", "dynamic:16/4/4", Acceptance.MATCH), ("eagle", "chain:4", Acceptance.BLOCK), ("medusa", "chain:3", Acceptance.MATCH),
])  # fmt: skip
def test_on_a_gpu_replayed_graphs_give_the_uncaptured_steps(example_model, tmp_path, request, head, tree, acceptance):
    """With the example model, whose heads are as wide as the kernels want them."""
    config = BuildConfig(
        target=example_model, head=(request.config.rootpath / "examples" / "heads" / head,), output=tmp_path / "engine",
        dtype=DataType.FLOAT32, max_batch_size=4,
    )  # fmt: skip
    engine = read_engine(build_engine(config).path)
    expected, _ = texts(TorchExecutor(engine, "cuda"), tree, acceptance, is_captured=False)
    captured, graphs = texts(TorchExecutor(engine, "cuda"), tree, acceptance, is_captured=True, capture=cuda_capture)
    assert captured == expected
    assert graphs is not None
    assert len(graphs.captured) >= 2, "CUDA refused a graph, and the steps ran uncaptured"


def test_draft_models_catch_up_in_filled_up_batches(model_executors):
    expected, _ = texts(model_executors["noisy"], "chain:3", Acceptance.MATCH, is_captured=False)
    captured, _ = texts(model_executors["noisy"], "chain:3", Acceptance.MATCH, is_captured=True)
    assert captured == expected


def test_plans_are_captured_with_a_context_for_each_shape(tiny_engine, tmp_path):
    settings = {"tree": "dynamic:12/3/4", "max_batch_size": 4, "prefill_chunk_tokens": 48}
    built = read_engine(tiny_engine("eagle3", **settings))
    engine = as_tensorrt_engine(built, tmp_path)
    runtime = TorchRuntime(engine)
    executor = TensorRTExecutor(engine, runtime, device="cpu")
    expected, _ = texts(TorchExecutor(built), settings["tree"], Acceptance.MATCH, is_captured=False)
    captured, _ = texts(executor, settings["tree"], Acceptance.MATCH, is_captured=True)
    assert captured == expected
    for name, plan in executor._plans.items():
        contexts = [*(profile.context for profile in plan.profiles), *plan._lasting.values()]
        assert len({id(context) for context in contexts}) == len(contexts)
        for shapes, context in plan._lasting.items():
            assert dict(shapes).items() <= context.shapes.items(), f"{name}: a context has seen another shape"
            assert context.num_shapes_set == len(shapes), "its shapes were set once"


def test_rows_that_are_added_write_on_the_scratch_page_alone(tiny_engine):
    executor = TorchExecutor(read_engine(tiny_engine("eagle3", max_batch_size=4)))
    expected, _ = texts(executor, "dynamic:12/3/4", Acceptance.MATCH, is_captured=False)
    assert not executor.target_pool[:, -1].any(), "an uncaptured step needs no scratch page"
    pool = executor.target_pool[:, :-1].clone()
    executor.target_pool.zero_()
    executor.head_pool.zero_()
    assert texts(executor, "dynamic:12/3/4", Acceptance.MATCH, is_captured=True)[0] == expected
    assert executor.target_pool[:, -1].any()
    # Which pages are touched is the same; rounding differs with the number of rows.
    torch.testing.assert_close(executor.target_pool[:, :-1], pool, atol=1e-3, rtol=1e-3)


@pytest.fixture
def step(tiny_engine) -> Step:
    engine = read_engine(tiny_engine("medusa", max_batch_size=4, tree="chain:3"))
    return Step(TorchExecutor(engine), engine.manifest.tree)


@torch.inference_mode()
def test_the_smallest_bucket_that_holds_the_batch_is_taken(step):
    graphs = graphs_of(step.executor, step)
    for batch, bucket in ((1, 1), (2, 2), (3, 4), (4, 4)):
        result = graphs.run(rows_of(step, batch))
        assert result is not None
        assert result.token_ids.shape == (batch, 4)
        assert [variant.batch for variant in graphs.captured][-1] == bucket
    assert len(graphs.captured) == 3
    assert graphs.run(rows_of(step, 5)) is None, "no bucket holds five"


@torch.inference_mode()
def test_manners_of_choosing_share_a_graph_where_they_run_the_same_kernels(step):
    graphs = graphs_of(step.executor, step)
    ones = torch.ones(2)
    drawn = {"is_greedy": False, "temperature": ones}
    for sampling in (
        {"largest_top_k": 5, "uses_top_p": True},  # greedy rows need neither
        {},
        {**drawn, "largest_top_k": 33},
        {**drawn, "largest_top_k": 64},
        {**drawn, "largest_top_k": 200},
        {**drawn, "min_p": ones / 9},
    ):
        assert graphs.run(rows_of(step, 2, **sampling)) is not None
    found = [(variant.is_greedy, variant.largest_top_k, variant.has_min_p) for variant in graphs.captured]
    assert found == [(True, None, False), (False, 64, False), (False, 256, False), (False, None, True)]
    assert graphs.run(rows_of(step, 2, processing=SimpleNamespace())) is None, "penalties are not captured"


@torch.inference_mode()
def test_results_outlive_the_next_step(step):
    graphs = graphs_of(step.executor, step)
    first = graphs.run(rows_of(step, 1))
    kept = first.states.clone()
    rows = rows_of(step, 1)
    graphs.run(replace(rows, draft=replace(rows.draft, root_ids=rows.draft.root_ids + 50)))
    assert torch.equal(first.states, kept)


@torch.inference_mode()
def test_a_step_that_cannot_be_captured_runs_all_the_same(step, caplog):
    def refuse(program, warm_up):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    step.graphs = graphs_of(step.executor, step, refuse)
    expected = step.run_uncaptured(rows_of(step, 2)).token_ids
    for _ in range(2):
        assert torch.equal(step.run(rows_of(step, 2)).token_ids, expected)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "steps run uncaptured, because CUDA refused the graph"
    ], "said once"


@torch.inference_mode()
def test_graphs_are_limited_in_number(step):
    graphs = graphs_of(step.executor, step)
    graphs.captured = dict.fromkeys(range(MAX_GRAPHS))
    assert graphs.run(rows_of(step, 1)) is None
