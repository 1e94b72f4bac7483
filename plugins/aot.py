"""Ahead-of-time compilation of a kernel on a machine without a GPU: PTX, cubin, and what the chip will make of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from furcate.builder.errors import BuildError
from furcate.plugins.chips import REGISTERS_PER_SM, WARP_SIZE, Chip, chip_of

TENSOR_MEMORY_COLUMNS = 512
RESERVED_SHARED_BYTES = 1024
"""What the driver keeps of shared memory for itself in every block."""
ADDR_NO_RANDOMIZE = 0x0040000
"""personality(2)."""


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """A kernel with its types: `signature` maps argument names to Triton types, `constants` the rest to values."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    max_registers: int | None = None
    """Registers a thread may take; None leaves it to ptxas."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Resources of a compiled kernel; `opcodes` counts SASS instructions by their first word, where they can be read."""

    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    num_warps: int
    opcodes: Counter[str] | None = field(repr=False)

    @property
    def ctas_per_sm(self) -> int:
        """Blocks that fit an SM at once: the least that registers, shared memory, threads, tensor memory allow."""
        chip = chip_of(self.arch)
        registers_per_warp = -(-self.registers * WARP_SIZE // 256) * 256
        limits = [
            REGISTERS_PER_SM // (registers_per_warp * self.num_warps),
            chip.shared_bytes_per_sm // (self.shared_bytes + RESERVED_SHARED_BYTES),
            chip.threads_per_sm // (WARP_SIZE * self.num_warps),
        ]
        if self.tensor_memory_columns:
            limits.append(TENSOR_MEMORY_COLUMNS // self.tensor_memory_columns)
        return min(limits)

    @property
    def fits(self) -> bool:
        """Whether the chip can launch it; the compiler itself never checks shared memory."""
        return self.shared_bytes <= chip_of(self.arch).shared_bytes_per_block


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """PTX and cubin of one kernel for one architecture."""

    name: str
    ptx: str
    cubin: bytes
    report: KernelReport


_compiled: dict[str, CompiledKernel] = {}


def compile_kernel(source: KernelSource, arch: int) -> CompiledKernel:
    """The kernel compiled for sm_<arch>, the same PTX on every machine; ConfigError for an unknown arch.

    Kept for the process: an engine asks for the same kernel once a layer and tactic.
    """
    key = repr((source, arch))
    if key not in _compiled:
        _compiled[key] = compile_afresh(source, arch)
    return _compiled[key]


def compile_afresh(source: KernelSource, arch: int) -> CompiledKernel:
    """As `compile_kernel`, without looking whether it was compiled before in this process."""
    chip = chip_of(arch)
    names = source.kernel.arg_names
    # Buffers of torch and TensorRT are aligned to 256 bytes; scalars promise nothing.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if source.signature.get(name, "").startswith("*")
    }
    ast = ASTSource(
        fn=source.kernel,
        signature={name: source.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in source.constants.items()},
        attrs=aligned,
    )
    options = {
        "num_warps": source.num_warps,
        "num_stages": 1,
        "maxnreg": source.max_registers,
        "ptx_version": chip.ptx_version,
    }
    with knobs.compilation.scope(), fixed_addresses():
        knobs.compilation.disable_line_info = True  # file paths would make the bytes differ by directory
        compiled = triton.compile(ast, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    report = _report(compiled.metadata, cubin, chip)
    return CompiledKernel(name=compiled.metadata.name, ptx=ptx, cubin=cubin, report=report)


@contextlib.contextmanager
def fixed_addresses() -> Iterator[bool]:
    """Whether processes started meanwhile lay out their memory alike; a container may forbid it.

    Triton's ptxas for Blackwell (12.9) numbers registers by where things lie: without this, one PTX becomes two cubins.
    """
    libc = ctypes.CDLL(None)
    before = libc.personality(0xFFFFFFFF)
    is_fixed = before >= 0 and libc.personality(before | ADDR_NO_RANDOMIZE) >= 0
    try:
        yield is_fixed
    finally:
        if is_fixed:
            libc.personality(before)


def _report(metadata: Any, cubin: bytes, chip: Chip) -> KernelReport:
    usage = _cuobjdump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise BuildError(f"cuobjdump named no registers for sm_{chip.arch}; it printed: {usage.strip()[:200]}")
    return KernelReport(
        arch=chip.arch,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=metadata.shared,
        tensor_memory_columns=metadata.tmem_size or 0,
        num_warps=metadata.num_warps,
        opcodes=opcodes_of(_cuobjdump(cubin, "-sass")) if chip.is_disassembled else None,
    )


def opcodes_of(sass: str) -> Counter[str]:
    """How often each opcode occurs in cuobjdump's listing, modifiers dropped."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.MULTILINE))


def _cuobjdump(cubin: bytes, option: str) -> str:
    """Output of the cuobjdump that triton ships beside its ptxas."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [str(tools / "cuobjdump"), option, file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
        ).stdout
