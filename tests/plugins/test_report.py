"""The kernel report and the static model behind it."""

import os

import pytest

from furcate.builder.errors import ConfigError
from furcate.plugins import report
from furcate.plugins.chips import CHIPS, chip_of
from furcate.plugins.tree_attention.model import COPY_SHARE, LOADED_LATENCY_US, Workload, predict
from furcate.plugins.tree_attention.spec import HEAD_DIMS, AttentionSpec
from furcate.plugins.tree_attention.tactics import TACTICS, choose_tactic, fitting_lines


def workload(nodes: int) -> Workload:
    """The example of the roofline: Llama-3 8B, eight sequences of 8192 tokens."""
    return Workload(spec=report.SPEC, batch=8, prefix=8192, nodes=nodes)


def test_bytes_and_flops_of_the_roofline_example():
    """8 x 8192 tokens x 8 heads x 128 x 2 (K, V) x 2 bytes = 268 MB of prefix; 272 MB with the tree of 16 nodes."""
    assert workload(16).minimum_bytes == pytest.approx(272e6, rel=0.01)
    assert workload(16).floor_us(chip_of(90)) == pytest.approx(57, abs=1)
    assert workload(64).floor_us(chip_of(90)) == pytest.approx(70, abs=1)  # tensor bound


@pytest.mark.parametrize("table", report.ROUTES.values(), ids=report.ROUTES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_floor_is_never_beaten_by_any_tactic(table, head_dim):
    for chip in CHIPS.values():
        for line in fitting_lines(table, chip.arch, head_dim, 2):
            spec = AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=head_dim)
            work = Workload(spec=spec, batch=8, prefix=8192, nodes=(line.max_rows or 256) // 4)
            prediction = predict(work, chip, line.tactic, line.tactic.ctas_per_sm)
            assert 0 < prediction.floor_share <= 1
            assert 0 < prediction.occupied_share <= 1


def test_every_tactic_keeps_enough_copies_in_flight():
    """So many bytes as arrive within the loaded latency at copy speed: 31 KB on every SM of an H200."""
    for chip in CHIPS.values():
        needed = COPY_SHARE * chip.terabytes_per_second * LOADED_LATENCY_US * 1e6 / chip.num_sms
        for head_dim in HEAD_DIMS:
            for line in fitting_lines(TACTICS, chip.arch, head_dim, 2):
                spec = AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=head_dim)
                work = Workload(spec=spec, batch=8, prefix=8192, nodes=(line.max_rows or 256) // 4)
                assert predict(work, chip, line.tactic, line.tactic.ctas_per_sm).bytes_in_flight >= needed, line


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
