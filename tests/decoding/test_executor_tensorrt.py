"""The TensorRT executor over a runtime that runs plans with torch: its texts are the torch executor's; clear refusals.

The law is exact: both compute in float32 with the same operations, and greedy choices of a random model have wide margins.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_runtime import PLUGINS, VERSION, TorchRuntime, as_tensorrt_engine, record_of

from furcate.builder.config import Executor
from furcate.builder.engine import read_engine
from furcate.builder.errors import EngineMismatch
from furcate.builder.network.inputs import PassInputs
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.drafted_rows import chain_words, fitting_words
from furcate.decoding.executors.load import load_executor
from furcate.decoding.executors.ranks import join_ranks, place_in_environment
from furcate.decoding.executors.tensorrt import TensorRTExecutor, check_machine, load_tensorrt_executor, pass_tensors
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler


def texts(executor, tree: str) -> dict[int, list[tuple[int, ...]]]:
    """The tokens of every step: other drafts would give other steps of the same text."""
    kind = executor.head.kind if executor.head is not None else None
    scheduler = Scheduler(executor, parse_tree(tree, kind, num_heads=executor.head.num_heads if executor.head else 0))
    generator = torch.Generator().manual_seed(7)
    for index, (length, max_tokens) in enumerate(((40, 17), (3, 9), (65, 12))):
        prompt = tuple(torch.randint(2, 258, (length,), generator=generator).tolist())
        scheduler.add(Request(request_id=index, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)))
    out: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    while scheduler.sequences:
        for output in scheduler.step():
            out[output.request_id].append(output.token_ids)
    return out


@pytest.fixture
def tensorrt_engine(tiny_engine, tmp_path):
    def make(head, **settings):
        return as_tensorrt_engine(read_engine(tiny_engine(head, **settings)), tmp_path)

    return make


@pytest.mark.parametrize(("head", "tree"), [
    (None, "single"), ("eagle3", "dynamic:12/3/4"), ("eagle", "chain:4"), ("medusa", "chain:3"),
])  # fmt: skip
def test_every_step_is_the_torch_executors(tensorrt_engine, tiny_engine, head, tree):
    settings = {"tree": tree, "max_batch_size": 4, "prefill_chunk_tokens": 48}
    engine = tensorrt_engine(head, **settings)
    runtime = TorchRuntime(engine)
    executor = TensorRTExecutor(engine, runtime, device="cpu")
    expected = texts(TorchExecutor(read_engine(tiny_engine(head, **settings))), tree)
    assert texts(executor, tree) == expected
    assert all(plan.num_passes > 0 for plan in runtime.plans.values())


@pytest.mark.parametrize("head", ["eagle3", "eagle", "medusa"])
def test_an_adaptive_engine_measures_passes_that_its_profiles_hold_and_writes_the_same_text(
    tensorrt_engine, tiny_engine, head
):
    settings = {"tree": "dynamic:12/2/4", "max_batch_size": 2, "prefill_chunk_tokens": 32, "max_context_tokens": 130}
    engine = tensorrt_engine(head, adaptive=True, **settings)
    request = Request(request_id=0, prompt_ids=tuple(range(5, 45)), sampling=SamplingParams(max_tokens=24))
    written = []
    for executor, tree in (
        (TensorRTExecutor(engine, TorchRuntime(engine), device="cpu"), None),
        (TorchExecutor(read_engine(tiny_engine(head, **settings))), parse_tree("single", None)),
    ):
        scheduler = Scheduler(executor, tree)
        scheduler.add(request)
        tokens: list[int] = []
        while scheduler.sequences:
            tokens += [token for output in scheduler.step() for token in output.token_ids]
        written.append(tokens)
    assert engine.manifest.is_adaptive
    assert written[0] == written[1]


@pytest.mark.parametrize(("head", "tree"), [
    ("hydra", "dynamic:12/2/3"), ("hydra-prefix", "chain:3"), ("model", "dynamic:9/2/3"),
])  # fmt: skip
def test_hydra_heads_and_draft_models_too(engine_with, more_heads, noisy_target, tmp_path, head, tree):
    settings = {"tree": tree, "max_batch_size": 4, "prefill_chunk_tokens": 48}
    built = read_engine(engine_with(noisy_target if head == "model" else more_heads[head], **settings))
    engine = as_tensorrt_engine(built, tmp_path)
    runtime = TorchRuntime(engine)
    executor = TensorRTExecutor(engine, runtime, device="cpu")
    assert texts(executor, tree) == texts(TorchExecutor(built), tree)
    assert all(plan.num_passes > 0 for plan in runtime.plans.values())


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("head", "tree"), [("eagle3", "dynamic:12/3/4"), (None, "single")])
def test_two_ranks_write_the_texts_of_one(tensorrt_engine, tiny_engine, tmp_path, head, tree):
    """Two processes as mpirun starts them, each with its part of the weights and of the K/V cache."""
    settings = {"tree": tree, "max_batch_size": 4, "prefill_chunk_tokens": 48}
    engine_dir = tiny_engine(head, **settings)
    tensorrt_engine(head, **settings)
    (tmp_path / "rank1.engine").write_text("target")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "rank_process.py"), str(engine_dir), str(tmp_path), tree]
    started = []
    for rank in range(2):
        place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        started.append(subprocess.Popen(command, env={**os.environ, **place}, stdout=subprocess.PIPE, text=True))
    (texts_of_ranks, num_passes), num_followed = [
        json.loads(process.communicate(timeout=120)[0]) for process in started
    ]
    expected = texts(TorchExecutor(read_engine(engine_dir)), tree)
    assert {int(key): value for key, value in texts_of_ranks.items()} == {
        key: [token for step in steps for token in step] for key, steps in expected.items()
    }
    assert num_followed == num_passes > 0


def test_a_divided_engine_wants_its_ranks(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        EngineMismatch, match="divided among 2 GPUs, which wants 2 ranks, and no launcher started this process"
    ):
        join_ranks(2)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(EngineMismatch, match="wants 2 ranks, and the launcher started 4; see 'More than one GPU'"):
        join_ranks(2)
    assert place_in_environment() == (1, 4)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has several GPUs")
def test_a_machine_with_too_few_gpus_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(EngineMismatch, match=r"divided among 2 GPUs, this machine has [01]; build it with --tp-size"):
        join_ranks(2)


def test_a_pass_outside_every_profile_is_refused_with_its_shape(tensorrt_engine):
    engine = tensorrt_engine(None, tree="single", max_batch_size=2)
    executor = TensorRTExecutor(engine, TorchRuntime(engine), device="cpu")
    inputs = PassInputs(
        token_ids=torch.zeros(3, 1), positions=torch.zeros(3, 1), tree_mask=None,
        cache_lengths=torch.zeros(3), page_table=torch.zeros(3, 2),
    )  # fmt: skip
    with pytest.raises(EngineMismatch, match=r"no profile of the engine holds a pass of token_ids \[3, 1\]"):
        executor.target_pass(inputs)


def test_a_missing_or_foreign_plan_is_refused(tensorrt_engine):
    engine = tensorrt_engine("medusa")
    (engine.path / "rank0.head.engine").write_text("nothing")
    with pytest.raises(EngineMismatch, match=rf"TensorRT {VERSION} cannot load .*rank0\.head\.engine"):
        TensorRTExecutor(engine, TorchRuntime(engine), device="cpu")
    (engine.path / "rank0.head.engine").unlink()
    with pytest.raises(EngineMismatch, match=r"rank0\.head\.engine cannot be read"):
        TensorRTExecutor(engine, TorchRuntime(engine), device="cpu")


MACHINES = [
    ((VERSION, 120, PLUGINS), r"was built for h100 \(sm_90\), this machine's GPU is of sm_120"),
    (("10.14.1", 90, PLUGINS), r"was built with TensorRT 11\.4\.0\.106, this is 10\.14\.1"),
    (
        (VERSION, 90, "feedfeedfeedfeed"),
        r"plugins are of version 0123456789abcdef, this furcate's are feedfeedfeedfeed",
    ),
]


@pytest.mark.parametrize(("machine", "sentence"), MACHINES)
def test_another_gpu_tensorrt_or_plugin_version_is_refused_by_name(tiny_engine, machine, sentence):
    record = record_of(read_engine(tiny_engine("medusa")).manifest)
    check_machine(record, VERSION, 90, PLUGINS)
    with pytest.raises(EngineMismatch, match=sentence):
        check_machine(record, *machine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_tensorrt_or_gpu_one_sentence_says_what_is_missing(tensorrt_engine):
    with pytest.raises(EngineMismatch, match=r"needs TensorRT 11\.4\.0\.106 on a GPU of sm_90, and .* here"):
        load_tensorrt_executor(tensorrt_engine("medusa"))


def test_a_torch_engine_is_refused(tiny_engine):
    with pytest.raises(EngineMismatch, match="is an engine for the torch executor; build one with --executor tensorrt"):
        load_tensorrt_executor(read_engine(tiny_engine("medusa")))


def test_the_manifest_keeps_the_bindings(tensorrt_engine, tmp_path):
    engine = tensorrt_engine("eagle3")
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_text(engine.manifest.to_json())
    assert read_engine(tmp_path, checks_hashes=False).manifest == engine.manifest


def test_chain_words_are_the_packed_mask_of_a_chain():
    words = chain_words(1, 65, torch.device("cpu"))
    assert words.shape == (1, 65, 3)
    bits = (words[0, :, :, None].long() >> torch.arange(32)) & 1
    torch.testing.assert_close(bits.flatten(1)[:, :65], torch.ones(65, 65).tril().long())
    assert fitting_words(words, 33).shape[-1] == 2


def test_rows_without_a_count_are_all_nodes():
    inputs = PassInputs(
        token_ids=torch.zeros(2, 5), positions=torch.zeros(2, 5), tree_mask=None, cache_lengths=torch.zeros(2),
        page_table=torch.zeros(2, 3),
    )  # fmt: skip
    tensors = pass_tensors(inputs)
    assert tensors["num_nodes"].tolist() == [5, 5]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}


def test_the_manifest_chooses_the_executor(tiny_engine):
    engine = read_engine(tiny_engine("medusa"))
    assert isinstance(load_executor(engine), TorchExecutor)
    plans = replace(
        engine, manifest=replace(engine.manifest, executor=Executor.TENSORRT, tensorrt=record_of(engine.manifest))
    )
    with pytest.raises(EngineMismatch, match=r"needs TensorRT 11\.4\.0\.106|was built for h100"):
        load_executor(plans)
