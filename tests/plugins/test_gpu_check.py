"""The GPU script on the CPU, tiny and interpreted: every section that needs no GPU runs and finds the kernel right."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from furcate.plugins.specification import TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
DTYPES = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_every_section_runs_without_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
    result = run("--toy", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "toy.json").read_text())
    assert found["machine"]["is_toy"]
    assert [row["ok"] for row in found["correctness"]] == [True] * 3
    assert found["step"][0]["accepted"] == [2, 2]
    assert {row["variant"] for row in found["ablations"]} == {
        "as it is",
        "split-K off",
        "GQA packing off",
        "rotation and storing not fused",
    }
    assert all(row["ok"] for row in found["ablations"])
    timed = {row["peer"] for row in found["peers"] if "us" in row}
    assert {"furcate", "SDPA, dense mask", "FlexAttention"} <= timed
    assert any(peer.startswith("serial prefix (stand-in") for peer in timed)
    assert all("us" in row for row in found["timings"])
    assert "needs a GPU" in found["driver"][0]["not_run"]
    assert (tmp_path / "toy.txt").read_text().count("\n== ") == 7


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run()
    assert result.returncode == 2
    assert result.stdout.strip() == "gpu_check needs an NVIDIA GPU and found none; --toy tries the script without one."


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """(benchmarks/gpu/driver.py, gpu/problems.py, the stub that it takes for the CUDA driver)."""
    pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("TRITON_INTERPRET is set: kernels cannot be compiled in this process")
    if shutil.which("gcc") is None:
        pytest.skip("the stub of libcuda needs gcc")
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).with_name("libcuda_stub.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from gpu import driver, problems

    stub = ctypes.CDLL(str(library))
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: stub)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return driver, problems, stub


def test_driver_section_launches_both_kernels_with_and_without_a_raised_limit(driver):
    """What it compiles, loads and launches, over a stub that launches nothing: so the result itself is never right."""
    module, problems, stub = driver
    problem = problems.make_problem(problems.Shape(batch=2, prefix=100, nodes=16, group=4), "cpu")
    width = problem.spec.num_query_heads * problem.spec.head_dim
    count = len(TREE_ATTENTION_REDUCE.kernel_arguments)
    ctypes.c_int.in_dll(stub, "stubNumArguments").value = count
    rows = module.check_driver(problem, 90, torch.full((2, 16, width), torch.nan))
    assert [row["tactic"] for row in rows] == ["48 KB", "above 48 KB"]
    assert rows[0]["shared_bytes"] <= 49_152 < rows[1]["shared_bytes"]
    for row in rows:
        codes = ("launch_code_as_is", "raise_limit_code", "launch_code_raised", "reduce_code")
        assert [row[code] for code in codes] == [0, 0, 0, 0]
        assert not row["ok"]
    last = (ctypes.c_int * count).in_dll(stub, "stubArguments")
    at = TREE_ATTENTION_REDUCE.kernel_arguments.index
    assert (last[at("num_nodes")], last[at("num_splits")]) == (16, module.SPLITS)


def test_driver_section_gives_the_arguments_of_the_specification(driver):
    module, problems, _ = driver
    problem = problems.make_problem(problems.Shape(batch=2, prefix=100, nodes=16, group=4), "cpu")
    partial = torch.empty(16, module.SPLITS, 64, 128), torch.empty(16, module.SPLITS, 64, 2)
    given = dict(zip(TREE_ATTENTION_SPLIT.kernel_arguments, module.split_arguments(problem, *partial), strict=True))
    for entry in (*TREE_ATTENTION_SPLIT.inputs, *TREE_ATTENTION_SPLIT.outputs):
        tensor = given[f"{entry.name}_ptr"]
        assert tensor.ndim == len(entry.shape), entry.name
        assert tensor.dtype == DTYPES.get(entry.dtype, problem.inputs.qkv.dtype), entry.name
    assert [given[name] for name in TREE_ATTENTION_SPLIT.scalars] == [0, 16, 1, 2, module.SPLITS, 0]
