"""The GPU script on the CPU, tiny and interpreted: every section that needs no GPU runs and finds the kernel right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


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
