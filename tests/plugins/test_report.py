"""The kernel report and the static model behind it."""

import os

import pytest

from furcate.builder.errors import ConfigError
from furcate.plugins import report
from furcate.plugins.chips import chip_of
from furcate.plugins.tree_attention.model import Workload, predict
from furcate.plugins.tree_attention.tactics import choose_tactic


def workload(nodes: int) -> Workload:
    """The example of the roofline: Llama-3 8B, eight sequences of 8192 tokens."""
    return Workload(spec=report.SPEC, batch=8, prefix=8192, nodes=nodes)


def test_bytes_and_flops_of_the_roofline_example():
    """8 x 8192 tokens x 8 heads x 128 x 2 (K, V) x 2 bytes = 268 MB of prefix; 272 MB with the tree of 16 nodes."""
    assert workload(16).minimum_bytes == pytest.approx(272e6, rel=0.01)
    assert workload(16).floor_us(chip_of(90)) == pytest.approx(57, abs=1)
    assert workload(64).floor_us(chip_of(90)) == pytest.approx(70, abs=1)  # tensor bound


def test_floor_is_never_beaten():
    for arch in (80, 90, 100, 120):
        for nodes in (1, 16, 64):
            chip, work = chip_of(arch), workload(nodes)
            prediction = predict(work, chip, choose_tactic(arch, work.rows, 128, 2), ctas_per_sm=2)
            assert 0 < prediction.floor_share <= 1
            assert 0 < prediction.occupied_share <= 1


def test_too_few_bytes_in_flight_cost_bandwidth():
    """One stage in flight of one CTA an SM is 32 KB: 132 SMs get 4.3 TB/s at 1 us latency, 16 KB only half of it."""
    chip, work = chip_of(90), workload(1)
    tactic = choose_tactic(90, 4, 128, 2)
    halved = type(tactic)(block_m=16, block_n=32, block_t=16, num_warps=4, num_stages=2)
    assert predict(work, chip, halved, 1).memory_us > 1.9 * predict(work, chip, tactic, 3).memory_us


def test_report_lists_every_kernel_of_a_chip(capsys, monkeypatch):
    pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("TRITON_INTERPRET is set: kernels cannot be compiled in this process")
    rows = list(report.kernel_rows((90,)))
    assert [row.kernel for row in rows] == ["split"] * 4 + ["split, TensorRT"] * 3 + ["reduce", "commit"]
    assert all(row.report.stack_bytes == 0 and row.report.fits for row in rows)
    monkeypatch.setenv("COLUMNS", "170")
    report.print_kernels((90,))
    printed = capsys.readouterr().out
    assert "HGMMA" in printed
    assert "not measured" in printed


def test_missing_kernel_language_is_one_sentence(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(report.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs triton: pip install 'furcate\[gpu\]'"):
        next(report.kernel_rows((90,)))
