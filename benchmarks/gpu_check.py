"""One run that says what the kernel does on this GPU: correct, how fast, against whom, and why.

Needs torch and triton, nothing else, and under eight minutes: python benchmarks/gpu_check.py
Results go to benchmarks/results/ as JSON and as a table. --toy runs the same code on the CPU in triton's interpreter on
tiny shapes: it proves the script, its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--toy", action="store_true", help="tiny shapes in the interpreter, no GPU")
arguments.add_argument("--minutes", type=float, default=8.0, help="what is not begun by then is left out")
arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
options = arguments.parse_args()
if options.toy:
    os.environ["TRITON_INTERPRET"] = "1"  # counts at triton's import, so before the imports below

sys.path.insert(0, str(Path(__file__).parent))
import torch  # noqa: E402
from gpu.machine import Machine, import_furcate  # noqa: E402

import_furcate()
from gpu import correctness, peers, step, unfused  # noqa: E402
from gpu.problems import Problem, Shape, make_problem  # noqa: E402

from furcate.plugins.chips import closest_chip  # noqa: E402

GRID = [
    Shape(batch=b, prefix=p, nodes=n, group=g)
    for g in (4, 8) for b in (1, 8, 32) for p in (2048, 8192, 32768) for n in (1, 8, 16, 32, 64)
]  # fmt: skip
COMPARED = [Shape(batch=b, prefix=8192, nodes=n, group=4) for b in (1, 8) for n in (1, 16, 64)]
LLAMA_16 = Shape(batch=8, prefix=8192, nodes=16, group=4)


class Check:
    """The run: its machine and what it has found so far."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.results: dict = {"machine": machine.describe()}
        self.table: list[str] = []

    def problem(self, shape: Shape) -> Problem:
        """The shape's problem, tiny with --toy."""
        return make_problem(shape.toy() if self.machine.is_toy else shape, self.machine.device)

    def bandwidth(self) -> list[dict]:
        """(b) What a copy and a matrix product reach here."""
        copy, product = self.machine.copy_terabytes_per_second(), self.machine.matmul_teraflops()
        self.results["copy_tb_s"], self.results["matmul_tf"] = copy, product
        return [{"copy_tb_s": copy, "matmul_tf": product}]

    def measured(self, problem: Problem, us: float) -> dict:
        """A time with its bandwidth and its share of copy bandwidth and of the floor."""
        work, arch = problem.workload, self.results["machine"].get("arch", 90)
        terabytes = work.minimum_bytes / us / 1e6
        memory_us = work.minimum_bytes / self.results["copy_tb_s"] / 1e6
        tensor_us = work.useful_flops / closest_chip(arch).bf16_teraflops / 1e6
        return {
            "us": us,
            "tb_s": terabytes,
            "of_copy": terabytes / self.results["copy_tb_s"],
            "of_floor": max(memory_us, tensor_us) / us,
        }

    def timings(self) -> list[dict]:
        """(c) The grid of shapes."""
        rows = []
        for shape in GRID[:2] if self.machine.is_toy else GRID:
            if self.machine.seconds_left() < 0.35 * 60 * options.minutes:
                rows.append({"left_out": f"{len(GRID) - len(rows)} shapes: the rest of the time is for the others"})
                break
            problem = self.problem(shape)
            launch = problem.launch()
            us = self.machine.time_us(lambda problem=problem, launch=launch: problem.run(launch))
            sizes = {"B": shape.batch, "prefix": shape.prefix, "nodes": shape.nodes, "group": shape.group}
            blocks = {"block_m": launch.tactic.block_m, "splits": launch.num_splits}
            rows.append(sizes | blocks | self.measured(problem, us))
        return rows

    def peers(self) -> list[dict]:
        """(d) Others on the same shapes; the kernel itself first."""
        rows = []
        for shape in COMPARED[1:2] if self.machine.is_toy else COMPARED:
            problem = self.problem(shape)
            candidates = {"furcate": lambda problem: lambda: problem.run(problem.launch())} | peers.PEERS
            for name, prepare in candidates.items():
                row = {"B": shape.batch, "nodes": shape.nodes, "peer": name}
                try:
                    rows.append(row | self.measured(problem, self.machine.time_us(prepare(problem))))
                except Exception as error:  # a peer that is absent or broken must not end the run
                    rows.append(row | {"not_run": f"{type(error).__name__}: {str(error)[:120]}"})
        return rows

    def ablations(self) -> list[dict]:
        """(e) What each idea is worth: the kernel without it."""
        rows = []
        for nodes in (16, 64) if not self.machine.is_toy else (4,):
            problem = self.problem(Shape(batch=1 if self.machine.is_toy else 8, prefix=8192, nodes=nodes, group=4))
            rotated = torch.empty_like(problem.inputs.qkv)
            expected = problem.run(problem.launch()).float()
            variants: dict[str, Callable[[], torch.Tensor]] = {
                "as it is": lambda p=problem: p.run(p.launch()),
                "split-K off": lambda p=problem: p.run(p.launch(num_splits=1)),
                "GQA packing off": lambda p=problem: p.run(p.launch(is_packed=False)),
                "rotation and storing not fused": lambda p=problem, r=rotated: unfused.run_unfused(p, r),
            }
            for name, call in variants.items():
                error = float((call().float() - expected).abs().max())
                row = {"nodes": nodes, "variant": name, "error": error, "ok": error < 2e-2}  # one bf16 unit at 2
                rows.append(row | self.measured(problem, self.machine.time_us(call)))
        return rows

    def driver(self) -> list[dict]:
        """(f) The engine's PTX through the driver."""
        if self.machine.is_toy:
            return [{"not_run": "needs a GPU; the interpreter compiles no PTX"}]
        from gpu.driver import check_driver

        problem = self.problem(LLAMA_16)
        expected = problem.run(problem.launch()).float()
        return check_driver(problem, self.results["machine"]["arch"], expected)

    def whole_step(self) -> list[dict]:
        """(g) A decoder step in one CUDA graph."""
        return step.check_step(self.machine, LLAMA_16.toy() if self.machine.is_toy else LLAMA_16)

    def run(self) -> dict:
        """All sections in order; a failing one is recorded with its traceback and the others still run."""
        sections: dict[str, Callable[[], list[dict]]] = {
            "correctness": lambda: correctness.check_attention(self.machine) + correctness.check_commit(self.machine),
            "bandwidth": self.bandwidth,
            "driver": self.driver,
            "step": self.whole_step,
            "timings": self.timings,
            "ablations": self.ablations,
            "peers": self.peers,
        }
        for name, section in sections.items():
            start = time.monotonic()
            try:
                rows = section() if self.machine.seconds_left() > 0 else [{"not_run": "out of time"}]
            except Exception:
                rows = [{"failed": traceback.format_exc(limit=4), "ok": False}]
            self.results[name] = rows
            self.results.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
            self.table.append(table_of(name, rows))
            print(self.table[-1], flush=True)
        return self.results


def table_of(name: str, rows: list[dict]) -> str:
    """A section as aligned columns; rows of other columns begin a new header."""
    lines, header = [f"\n== {name}"], []
    for row in rows:
        if list(row) != header:
            header = list(row)
            lines.append("  ".join(f"{key:>12}" for key in header))
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("  ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    """0 when every check that was run is right."""
    if not options.toy and not torch.cuda.is_available():
        print("gpu_check needs an NVIDIA GPU and found none; --toy tries the script without one.")
        return 2
    check = Check(Machine(options.toy, options.minutes))
    results = check.run()
    results["date"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    options.out.mkdir(parents=True, exist_ok=True)
    name = "toy" if options.toy else f"{results['machine']['gpu'].replace(' ', '_')}_{time.strftime('%Y%m%d_%H%M%S')}"
    (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{name}.txt").write_text("\n".join(check.table) + "\n")
    print(f"\nwrote {options.out / name}.json and .txt")
    rows = [row for section in results.values() if isinstance(section, list) for row in section]
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
