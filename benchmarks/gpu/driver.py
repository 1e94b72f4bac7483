"""(f) The engine's PTX, loaded by the driver and launched with TensorRT's argument order, at 48 KB and above.

TensorRT does the same: cuModuleLoadData, then cuLaunchKernel with inputs, int32 scalars, outputs. Whether a launch above
48 KB works without raising the kernel's limit is what decides if the larger tactics may go into an engine.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from gpu.problems import Problem

from furcate.plugins.aot import CompiledKernel, compile_kernel
from furcate.plugins.tensorrt_plugin import launchable_ptx
from furcate.plugins.tree_attention.aot import Variant, reduce_source, split_source
from furcate.plugins.tree_attention.tactics import PLUGIN_TACTICS, Tactic, choose_tactic

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SPLITS = 4


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel of a loaded module."""

    driver: ctypes.CDLL
    function: ctypes.c_void_p
    kernel: CompiledKernel

    def allow_shared(self) -> int:
        """Result code of raising the kernel's limit of dynamic shared memory to what it needs."""
        return self.driver.cuFuncSetAttribute(
            self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, self.kernel.report.shared_bytes
        )

    def launch(self, grid: tuple[int, int, int], arguments: list) -> int:
        """Result code of a launch on torch's stream: 0 is success."""
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int32(a) for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        report = self.kernel.report
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        return self.driver.cuLaunchKernel(
            self.function, *grid, 32 * report.num_warps, 1, 1, report.shared_bytes, stream, pointers, None
        )


def load(kernel: CompiledKernel) -> LoadedKernel:
    """The kernel's PTX through the driver's compiler; RuntimeError with the driver's code where it refuses."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = driver.cuModuleLoadData(ctypes.byref(module), launchable_ptx(kernel).encode() + b"\0")
    if code:
        raise RuntimeError(f"cuModuleLoadData of {kernel.name} gave {code}")
    code = driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode())
    if code:
        raise RuntimeError(f"cuModuleGetFunction of {kernel.name} gave {code}")
    return LoadedKernel(driver, function, kernel)


def split_arguments(problem: Problem, partial_out: torch.Tensor, stats: torch.Tensor) -> list:
    """The split kernel's arguments in TensorRT's order, the pool by address."""
    inputs, batch, rope = problem.inputs, problem.batch, problem.rope
    device, nodes = inputs.qkv.device, problem.shape.nodes
    num_valid = torch.full((problem.shape.batch,), nodes, dtype=torch.int32, device=device)
    unread = torch.ones(problem.shape.head_dim, device=device)
    addresses = torch.tensor([inputs.pool.data_ptr()], dtype=torch.int64, device=device)
    return [
        inputs.qkv, batch.positions, batch.tree_mask, num_valid, batch.cache_lengths, batch.page_table,
        rope.cos, rope.sin, unread, unread, unread, addresses,
        0, nodes, batch.tree_mask.shape[-1], batch.page_table.shape[1], SPLITS, 0,
        partial_out, stats,
    ]  # fmt: skip


def check_driver(problem: Problem, arch: int, expected: torch.Tensor) -> list[dict]:
    """A row per tactic: shared memory, result codes, and the error against `expected`, the launch through triton."""
    spec, rows_of_group = problem.spec, problem.workload.rows
    call = (arch, rows_of_group, spec.head_dim, 2)
    tactics = {"48 KB": choose_tactic(*call, PLUGIN_TACTICS), "above 48 KB": choose_tactic(*call)}
    return [{"tactic": name} | _check(problem, arch, tactic, expected) for name, tactic in tactics.items()]


def _check(problem: Problem, arch: int, tactic: Tactic, expected: torch.Tensor) -> dict:
    spec, shape = problem.spec, problem.shape
    groups, rows = shape.batch * spec.num_kv_heads, problem.workload.rows
    device = problem.inputs.qkv.device
    partial_out = torch.empty(groups, SPLITS, rows, spec.head_dim, device=device)
    stats = torch.empty(groups, SPLITS, rows, 2, device=device)
    out = torch.empty_like(expected, dtype=problem.inputs.qkv.dtype)
    split = load(compile_kernel(split_source(spec, tactic, Variant(page_size=shape.page_size)), arch))
    reduce = load(compile_kernel(reduce_source(spec, "bf16", SPLITS), arch))
    grid = (-(-rows // tactic.block_m), SPLITS, groups)
    arguments = split_arguments(problem, partial_out, stats)
    plain = split.launch(grid, arguments)
    raised = split.allow_shared()
    again = split.launch(grid, arguments)
    reduced = reduce.launch((rows, groups, 1), [partial_out, stats, problem.inputs.qkv, shape.nodes, SPLITS, out])
    torch.cuda.synchronize()
    error = float((out.float() - expected).abs().max())
    return {
        "shared_bytes": split.kernel.report.shared_bytes,
        "launch_code_as_is": plain,
        "raise_limit_code": raised,
        "launch_code_raised": again,
        "reduce_code": reduced,
        "error": error,
        "ok": again == 0 and reduced == 0 and error < 2e-2,  # bf16 results of another split, one unit at magnitude 2
    }
