"""What `furcate kernels` prints: every kernel compiled for a chip, its resources, and what the static model expects."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from furcate.builder.errors import ConfigError
from furcate.plugins.chips import CHIPS, chip_of
from furcate.plugins.tree_attention.model import Prediction, Workload, predict
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import (
    PLUGIN_TACTICS,
    TACTICS,
    TacticLine,
    choose_tactic,
    fitting_lines,
)

if TYPE_CHECKING:
    from furcate.plugins.aot import KernelReport

SPEC = AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=128)
"""The heads of Llama-3 8B, which the report's kernels are compiled for."""
BATCH, PREFIX = 8, 8192
NODES = (1, 8, 16, 32, 64)
COPIES = ("LDGSTS", "UTMALDG")
ROUTES = {"split": TACTICS, "split, TensorRT": PLUGIN_TACTICS}
"""Table of tactics of a torch call or the C++ plugins, and of an engine by tensorrt.plugin."""


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A compiled kernel: which, for how many rows, and what the chip makes of it."""

    arch: int
    kernel: str
    rows: str
    blocks: str
    report: KernelReport
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """The static model's expectation for one layer of a step, by the kernels of one route."""

    arch: int
    kernel: str
    nodes: int
    prediction: Prediction


def kernel_rows(archs: tuple[int, ...] | None = None) -> Iterator[KernelRow]:
    """Every tactic's kernel, the reduce and the commit, compiled one by one for each architecture (all by default).

    Raises ConfigError without the kernel language or for an unknown architecture.
    """
    aot, attention, commit = (_module(name) for name in ("aot", "tree_attention.aot", "cache_commit.aot"))
    for arch in archs or tuple(CHIPS):
        chip_of(arch)
        for route, table in ROUTES.items():
            for line in fitting_lines(table, arch, SPEC.head_dim, 2):
                source = attention.split_source(SPEC, line.tactic, attention.Variant())
                yield _row(aot.compile_kernel(source, arch).report, route, line)
        others = {"reduce": attention.reduce_source(SPEC, "bf16", 8), "commit": commit.commit_source(1024, 64, 8, 2)}
        for name, source in others.items():
            yield KernelRow(
                arch=arch, kernel=name, rows="", blocks="", report=aot.compile_kernel(source, arch).report, reason=""
            )


def model_rows(archs: tuple[int, ...] | None = None) -> Iterator[ModelRow]:
    """The expectation for 8 sequences of 8192 tokens with 1 to 64 nodes, by the CTAs the compiled kernels allow."""
    aot, attention = _module("aot"), _module("tree_attention.aot")
    for arch in archs or tuple(CHIPS):
        for route, table in ROUTES.items():
            for nodes in NODES:
                workload = Workload(spec=SPEC, batch=BATCH, prefix=PREFIX, nodes=nodes)
                tactic = choose_tactic(arch, workload.rows, SPEC.head_dim, 2, table)
                report = aot.compile_kernel(attention.split_source(SPEC, tactic, attention.Variant()), arch).report
                prediction = predict(workload, chip_of(arch), tactic, report.ctas_per_sm)
                yield ModelRow(arch=arch, kernel=route, nodes=nodes, prediction=prediction)


def print_kernels(archs: tuple[int, ...] | None = None) -> None:
    """Print both tables; nothing is run on a GPU."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("GPU", "kernel", "rows", "M x N x T, warps, stages", "regs", "stack", "shared B", "CTAs/SM",
                  "matrix", "copies", "spills", title="Kernels for 32 / 8 heads of 128, bf16, pages of 64")  # fmt: skip
    for row in kernel_rows(archs):
        table.add_row(f"sm_{row.arch}", row.kernel, row.rows, row.blocks, *_resources(row.report))
    console.print(table)
    table = Table("GPU", "kernel", "nodes", "splits", "in flight/SM", "slots used", "memory us", "tensor us", "expected us",
                  "floor us", "of floor", title=f"Static model, not measured: {BATCH} sequences of {PREFIX} tokens")  # fmt: skip
    for row in model_rows(archs):
        p = row.prediction
        table.add_row(
            f"sm_{row.arch} {chip_of(row.arch).name}", row.kernel, str(row.nodes), str(p.num_splits),
            f"{p.bytes_in_flight // 1024} KB", f"{p.occupied_share:.0%}", f"{p.memory_us:.0f}", f"{p.tensor_us:.0f}",
            f"{p.time_us:.0f}", f"{p.floor_us:.0f}", f"{p.floor_share:.0%}",
        )  # fmt: skip
    console.print(table)


def _row(report: KernelReport, kernel: str, line: TacticLine) -> KernelRow:
    tactic = line.tactic
    return KernelRow(
        arch=report.arch,
        kernel=kernel,
        rows="more" if line.max_rows is None else f"<= {line.max_rows}",
        blocks=f"{tactic.block_m} x {tactic.block_n} x {tactic.block_t}, {tactic.num_warps}, {tactic.num_stages}",
        report=report,
        reason=line.reason,
    )


def _resources(report: KernelReport) -> list[str]:
    """Cells of a kernel's resources; opcode counts are missing where triton's disassembler does not know the chip."""
    cells = [report.registers, report.stack_bytes, report.shared_bytes, report.ctas_per_sm]
    opcodes = report.opcodes
    if opcodes is None:
        return [*map(str, cells), "?", "?", "?"]
    wide = chip_of(report.arch).matrix_opcode
    matrix = next((f"{opcodes[name]} {name}" for name in (wide, "HMMA") if opcodes[name]), "")
    copies = sum(opcodes[name] for name in COPIES)
    return [*map(str, cells), matrix, str(copies), str(opcodes["LDL"] + opcodes["STL"])]


def _module(name: str):
    """A module of plugins/ that needs the kernel language."""
    try:
        return importlib.import_module(f"furcate.plugins.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"Compiling kernels needs {error.name}: pip install 'furcate[gpu]'.") from error
