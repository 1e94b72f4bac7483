"""What only a GPU can refuse in a step (a host read, a copy from the host), looked for on torch's meta device: the real step, its
operators' shapes and dtypes, and no data that could be read.
"""

import pytest
import torch
from step_rows import CASES, rows_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.ops import torch as torch_ops
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.step import Step
from furcate.plugins.tree_attention.op import KernelPlan


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
