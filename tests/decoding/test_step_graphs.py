"""Captured steps, on a machine without a GPU: bucket choice, rows that are filled up, buffers, and that nothing reads the host.

A capture is played by running the program again into the tensors of its first result, which is what a CUDA graph does. What
only a GPU can refuse (a host read, a copy from the host) is looked for on torch's meta device instead: the real step, its
operators' shapes and dtypes, and no data that could be read.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch_runtime import TorchRuntime, as_tensorrt_engine

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.ops import torch as torch_ops
from furcate.builder.tree_config import parse_tree
from furcate.decoding.drafters.proposer import DraftRows
from furcate.decoding.executors.graphs import cuda_capture
from furcate.decoding.executors.tensorrt import TensorRTExecutor
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.sampling import SamplingRows
from furcate.decoding.scheduler import Scheduler
from furcate.decoding.step import Step, StepRows
from furcate.decoding.step_graphs import MAX_GRAPHS, StepGraphs
from furcate.plugins.tree_attention.op import KernelPlan

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


CASES = [
    ("eagle3", "dynamic:12/3/4", Acceptance.MATCH), ("eagle", "eagle_mc_sim_7b_63", Acceptance.TRAVERSAL),
    ("medusa", "chain:3", Acceptance.BLOCK), ("eagle3", "dynamic:12/2/3", Acceptance.UNIVER), (None, "single", Acceptance.MATCH),
]  # fmt: skip


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


def rows_of(step: Step, batch: int, device="cpu", **sampling) -> StepRows:
    """Rows behind 20 tokens, each on two pages of its own."""
    executor = step.executor
    state = torch.zeros(batch, 64, dtype=executor.dtype, device=device)
    if executor.head is not None and executor.head.kind == "model":
        state = torch.ones(batch, step.proposer.state_width, dtype=torch.int64, device=device)
    defaults = {
        "temperature": torch.zeros(batch, device=device), "top_k": torch.full((batch,), 300, device=device),
        "top_p": torch.ones(batch, device=device), "seeds": torch.arange(batch, device=device),
        "is_greedy": True, "largest_top_k": None, "uses_top_p": False,
    }  # fmt: skip
    return StepRows(
        draft=DraftRows(
            states=state,
            root_ids=torch.full((batch,), 7, device=device),
            cache_lengths=torch.full((batch,), 20, dtype=torch.int32, device=device),
            page_table=torch.arange(4 * batch, dtype=torch.int32, device=device).view(batch, 4),
        ),
        sampling=SamplingRows(**{**defaults, **sampling}),
    )


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


class NoHostTraffic(TorchFunctionMode):
    """Fails where data goes from the host to the device. (A read back fails by itself: there is no data.)

    A number beside a tensor (x + 1) is an argument of a kernel; a list, or a tensor that lies on the host, is a copy.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{function} copies from the host"
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(index, list) for index in indices), "an index is copied from the host"
        values = [value for value in tree_flatten((args, kwargs or {}))[0] if isinstance(value, Tensor)]
        on_host = [value for value in values if value.device.type == "cpu"]
        result = function(*args, **(kwargs or {}))
        is_on_device = isinstance(result, Tensor) and result.device.type == "meta"
        assert not (on_host and is_on_device), f"{function} copies from the host"
        return result


def test_the_watch_sees_copies_and_reads():
    on_device = torch.zeros(3, 4, device="meta")
    with NoHostTraffic():
        on_device + 1
        for copies in (
            lambda: torch.tensor([1, 2], device="meta"),
            lambda: torch.tensor(1.5, device="meta"),
            lambda: on_device[:, [0, 1]],
            lambda: torch.arange(2).to("meta"),
            lambda: on_device[:, torch.arange(2)],
        ):
            with pytest.raises(AssertionError, match="from the host"):
                copies()
        for reads in (lambda: int(on_device.max()), lambda: bool(on_device.any()), on_device.tolist, on_device.nonzero):
            with pytest.raises((RuntimeError, NotImplementedError)):
                reads()


META_CASES = [
    *CASES, ("hydra-prefix", "chain:3", Acceptance.MATCH), ("model", "expansion:2,1", Acceptance.MULTI_STEP),
    ("eagle3", "expansion:2,2", Acceptance.RECURSIVE), ("medusa", "expansion:3,2", Acceptance.TYPICAL),
]  # fmt: skip


@pytest.fixture
def engine_of(tiny_engine, engine_with, more_heads, noisy_target):
    def make(head: str | None):
        if head in ("hydra-prefix", "model"):
            return read_engine(engine_with(noisy_target if head == "model" else more_heads[head]))
        return read_engine(tiny_engine(head, max_batch_size=4))

    return make


@pytest.mark.parametrize(("head", "tree", "acceptance"), META_CASES)
@torch.inference_mode()
def test_a_step_on_a_gpu_reads_nothing_back_and_copies_nothing_there(engine_of, head, tree, acceptance, monkeypatch):
    # The GPU's attention: the operator itself, whose shapes are known without a kernel.
    monkeypatch.setattr(torch_ops, "plan_attention", lambda batch, spec, rope, pool: KernelPlan(batch, spec, rope))
    engine, device = engine_of(head), torch.device("meta")
    spec = engine.manifest.head
    config = parse_tree(tree, spec.kind if spec else None, num_heads=spec.num_heads if spec else 0)
    step = Step(TorchExecutor(engine, device), config, acceptance)
    ones = torch.ones(3, device=device)
    for sampling in (
        {},
        {"is_greedy": False, "temperature": ones, "largest_top_k": 64, "uses_top_p": True, "min_p": ones,
         "returns_log_probs": True},
    ):  # fmt: skip
        rows = rows_of(step, 3, device, **sampling)
        step.run_uncaptured(rows)  # constants are made at the first step, before a capture
        with NoHostTraffic():
            result = step.run_uncaptured(rows)
        assert result.token_ids.device == device
        assert result.token_ids.shape == (3, config.max_depth + 1)
