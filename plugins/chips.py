"""The GPUs the kernels are compiled for: limits of the architecture, and the data-sheet figures of one chip of each.

Limits: CUDA C++ Programming Guide, "Compute Capabilities". Bandwidth and dense bf16 rates: the vendor's data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from furcate.builder.errors import ConfigError

REGISTERS_PER_SM = 65_536
MAX_REGISTERS_PER_THREAD = 255
WARP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One architecture, and the chip that stands for it in the static model."""

    arch: int
    name: str
    ptx_version: int
    """PTX ISA the compiler is pinned to, times ten: the oldest that knows the architecture's instructions."""
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    threads_per_sm: int
    matrix_opcode: str
    """SASS of the widest matrix instruction that the compiler emits there."""
    num_sms: int
    terabytes_per_second: float
    bf16_teraflops: float
    is_disassembled: bool = True
    """Whether the cuobjdump that triton 3.6.0 ships knows the architecture."""

    @property
    def has_wide_matrix_unit(self) -> bool:
        """Warp-group or tensor-memory instructions of 64 rows and more."""
        return self.matrix_opcode != "HMMA"


CHIPS = {
    chip.arch: chip
    for chip in (
        Chip(
            arch=80, name="A100", ptx_version=80, shared_bytes_per_block=166_912, shared_bytes_per_sm=167_936,
            threads_per_sm=2048, matrix_opcode="HMMA", num_sms=108, terabytes_per_second=2.04, bf16_teraflops=312,
        ),
        Chip(
            arch=89, name="L40S", ptx_version=81, shared_bytes_per_block=101_376, shared_bytes_per_sm=102_400,
            threads_per_sm=1536, matrix_opcode="HMMA", num_sms=142, terabytes_per_second=0.864, bf16_teraflops=362,
        ),
        Chip(
            arch=90, name="H200", ptx_version=80, shared_bytes_per_block=232_448, shared_bytes_per_sm=233_472,
            threads_per_sm=2048, matrix_opcode="HGMMA", num_sms=132, terabytes_per_second=4.8, bf16_teraflops=989,
        ),
        Chip(
            arch=100, name="B200", ptx_version=86, shared_bytes_per_block=232_448, shared_bytes_per_sm=233_472,
            threads_per_sm=2048, matrix_opcode="UTCHMMA", num_sms=148, terabytes_per_second=8.0, bf16_teraflops=2250,
        ),
        Chip(
            arch=103, name="B300", ptx_version=88, shared_bytes_per_block=232_448, shared_bytes_per_sm=233_472,
            threads_per_sm=2048, matrix_opcode="UTCHMMA", num_sms=148, terabytes_per_second=8.0, bf16_teraflops=2500,
            is_disassembled=False,
        ),
        Chip(
            arch=120, name="RTX 5090", ptx_version=87, shared_bytes_per_block=101_376, shared_bytes_per_sm=102_400,
            threads_per_sm=1536, matrix_opcode="HMMA", num_sms=170, terabytes_per_second=1.79, bf16_teraflops=210,
        ),
    )
}  # fmt: skip


def chip_of(arch: int) -> Chip:
    """The chip of compute capability arch / 10; ConfigError names the known ones."""
    if arch not in CHIPS:
        raise ConfigError(f"sm_{arch} is not known; the kernels are compiled for {sorted(CHIPS)}.")
    return CHIPS[arch]


def closest_chip(arch: int) -> Chip:
    """The chip of the newest known architecture not newer than `arch`; ConfigError below the oldest."""
    known = [chip for chip in CHIPS.values() if chip.arch <= arch]
    if not known:
        raise ConfigError(f"The GPU is of sm_{arch}; the kernels need sm_{min(CHIPS)} or newer.")
    return max(known, key=lambda chip: chip.arch)
