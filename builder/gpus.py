"""The GPUs that an engine can be planned for by name: architecture and memory, with the vendor's page each figure is from."""

from __future__ import annotations

from dataclasses import dataclass

from furcate.builder.errors import ConfigError

GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet has it. `memory_bytes` counts the sheet's GB as 10^9 bytes, the least they can mean."""

    name: str
    arch: int
    memory_bytes: int
    source: str


def _gpu(name: str, arch: int, gigabytes: int, source: str) -> Gpu:
    return Gpu(name, arch, gigabytes * GB, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 80, 40, "NVIDIA A100 data sheet (nvidia.com/en-us/data-center/a100)"),
        _gpu("a100-80gb", 80, 80, "NVIDIA A100 data sheet (nvidia.com/en-us/data-center/a100)"),
        _gpu("l40s", 89, 48, "NVIDIA L40S data sheet (nvidia.com/en-us/data-center/l40s)"),
        _gpu(
            "rtx-4090", 89, 24, "GeForce RTX 4090 specifications (nvidia.com/geforce/graphics-cards/40-series/rtx-4090)"
        ),
        _gpu("h100", 90, 80, "NVIDIA H100 SXM data sheet (nvidia.com/en-us/data-center/h100)"),
        _gpu("h100-nvl", 90, 94, "NVIDIA H100 NVL data sheet (nvidia.com/en-us/data-center/h100)"),
        _gpu("h200", 90, 141, "NVIDIA H200 data sheet (nvidia.com/en-us/data-center/h200)"),
        _gpu("b200", 100, 180, "NVIDIA HGX B200 data sheet, 1.4 TB for 8 GPUs (nvidia.com/en-us/data-center/hgx)"),
        _gpu("b300", 103, 262, "NVIDIA HGX B300 data sheet, 2.1 TB for 8 GPUs (nvidia.com/en-us/data-center/hgx)"),
        _gpu(
            "rtx-5090",
            120,
            32,
            "GeForce RTX 5090 specifications (nvidia.com/geforce/graphics-cards/50-series/rtx-5090)",
        ),
        _gpu(
            "rtx-pro-6000",
            120,
            96,
            "RTX PRO 6000 Blackwell data sheet (nvidia.com/products/workstations)",
        ),
    )
}


def gpu_named(name: str | None) -> Gpu:
    """The GPU of that name; ConfigError lists the known ones."""
    if name not in GPUS:
        given = "missing" if name is None else f"'{name}'"
        raise ConfigError(f"--gpu is {given}; allowed are {', '.join(GPUS)}.")
    return GPUS[name]
