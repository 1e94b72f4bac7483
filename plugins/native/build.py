"""Build the C++ plugins for one model: python -m furcate.plugins.native.build --num-query-heads 32 ...

Writes the tables that the C++ sources are driven by (from specification.py) and the cubins, then runs CMake. The result
is libfurcate_plugins.so: TensorRT loads it as a plugin library, and it runs tactics of more than 48 KB.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
import tyro

from furcate.builder.errors import BuildError, ConfigError, FurcateError
from furcate.plugins.aot import CompiledKernel, compile_kernel
from furcate.plugins.cache_commit.aot import commit_source
from furcate.plugins.specification import SPECIFICATIONS, PluginSpecification
from furcate.plugins.tree_attention.aot import ACTIVATIONS, Variant, reduce_source, split_source
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import TACTICS, fitting_lines

SOURCES = Path(__file__).parent
CUDA_HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
"""Triton's wheel carries the headers of the CUDA that it compiles with."""
TYPES = {"T": "kACTIVATION", "float32": "kFLOAT32", "int32": "kINT32", "int64": "kINT64"}
KINDS = ("kSPLIT", "kREDUCE", "kCOMMIT")
ANY_ROWS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """The model and GPUs that a plugin library is built for."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    output: Path
    """Folder of the generated files and of the library."""
    tensorrt_include: Path
    """Folder of NvInferRuntime.h."""
    cuda_include: Path = CUDA_HEADERS
    """Folder of cuda.h and cuda_runtime_api.h."""
    archs: tuple[int, ...] = (90, 100)
    activation: str = "bf16"
    page_size: int = 64
    has_fp8_pages: bool = False
    has_norms: bool = False
    is_chain: bool = False
    scale: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    norm_eps: float = 1e-6
    num_splits: int = 8
    max_entries: int = 32
    """Longest accepted path, root included."""

    @property
    def spec(self) -> AttentionSpec:
        """The attention layer."""
        return AttentionSpec(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            softcap=self.softcap,
            sliding_window=self.sliding_window,
            norm_eps=self.norm_eps,
        )

    def attributes(self) -> dict[str, float]:
        """Attribute values that the kernels are compiled for."""
        return {
            "num_query_heads": self.num_query_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "has_fp8_pages": int(self.has_fp8_pages),
            "scale": self.spec.score_scale,
            "softcap": self.softcap or 0.0,
            "sliding_window": self.sliding_window or 0,
            "norm_eps": self.norm_eps,
            "has_norms": int(self.has_norms),
            "is_chain": int(self.is_chain),
            "max_entries": self.max_entries,
            "element_bytes": 1 if self.has_fp8_pages else 2,
        }


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A compiled kernel with what the library chooses and launches it by."""

    kind: int
    arch: int
    max_rows: int
    block_size: int
    kernel: CompiledKernel
    attributes: dict[str, float]


def build_library(config: NativeConfig) -> Path:
    """Path of the built library; ConfigError for what cannot be compiled, BuildError where CMake fails."""
    if config.activation not in ("bf16", "fp16"):
        raise ConfigError(f"activation is {config.activation}; TensorRT plugins take bf16 or fp16.")
    if not (config.tensorrt_include / "NvInferRuntime.h").exists():
        raise BuildError(
            f"{config.tensorrt_include} holds no NvInferRuntime.h; name TensorRT's include folder, in NVIDIA's "
            "containers /usr/include/x86_64-linux-gnu."
        )
    generated = (config.output / "generated").resolve()
    generated.mkdir(parents=True, exist_ok=True)
    write_tables(config, generated)
    build = config.output.resolve() / "build"
    options = {
        "GENERATED_DIR": generated,
        "TENSORRT_INCLUDE": config.tensorrt_include.resolve(),
        "CUDA_INCLUDE": config.cuda_include.resolve(),
        "CMAKE_BUILD_TYPE": "Release",
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    _run("cmake", "-S", str(SOURCES), "-B", str(build), *definitions)
    _run("cmake", "--build", str(build))
    return build / "libfurcate_plugins.so"


def write_tables(config: NativeConfig, folder: Path) -> None:
    """Nothing; writes tables.cpp, cubins.S and the cubins."""
    rows = list(compiled_rows(config))
    for number, row in enumerate(rows):
        (folder / f"kernel_{number}.cubin").write_bytes(row.kernel.cubin)
    (folder / "cubins.S").write_text("".join(_embedded(number) for number in range(len(rows))))
    (folder / "tables.cpp").write_text(tables_source(config, rows))


def compiled_rows(config: NativeConfig) -> Iterator[TableRow]:
    """Every kernel of the model for every GPU: all tactics, whatever shared memory they take."""
    known = config.attributes()
    variant = Variant(
        activation=config.activation,
        page_size=config.page_size,
        has_fp8_pages=config.has_fp8_pages,
        has_norms=config.has_norms,
        is_chain=config.is_chain,
    )
    element_bytes = ACTIVATIONS[config.activation].primitive_bitwidth // 8
    for arch in config.archs:
        for line in fitting_lines(TACTICS, arch, config.head_dim, element_bytes):
            kernel = compile_kernel(split_source(config.spec, line.tactic, variant), arch)
            rows = ANY_ROWS if line.max_rows is None else line.max_rows
            yield TableRow(
                kind=0, arch=arch, max_rows=rows, block_size=line.tactic.block_m, kernel=kernel, attributes=known
            )
        kernel = compile_kernel(reduce_source(config.spec, config.activation, config.num_splits), arch)
        exact = known | {"num_splits": config.num_splits}
        yield TableRow(kind=1, arch=arch, max_rows=ANY_ROWS, block_size=1, kernel=kernel, attributes=exact)
        width = config.num_kv_heads * config.head_dim
        source = commit_source(width, config.page_size, config.max_entries, int(known["element_bytes"]))
        yield TableRow(
            kind=2,
            arch=arch,
            max_rows=config.max_entries,
            block_size=source.constants["BLOCK_C"],
            kernel=compile_kernel(source, arch),
            attributes=known,
        )


def tables_source(config: NativeConfig, rows: list[TableRow]) -> str:
    """C++ of the specifications and the kernels."""
    parts = ['#include "specification.h"\n\nnamespace furcate\n{\nnamespace\n{\n']
    parts += [_specification_arrays(number, s) for number, s in enumerate(SPECIFICATIONS)]
    for number, row in enumerate(rows):
        names = [entry.name for entry in SPECIFICATIONS[row.kind].attributes]
        values = ", ".join(_number(row.attributes.get(name, math.nan)) for name in names)
        parts.append(f"double const kATTRIBUTES_{number}[] = {{{values}}};\n")
    parts.append("} // namespace\n\n")
    parts += [f'extern "C" unsigned char const furcateCubin{number}[];\n' for number in range(len(rows))]
    specifications = ",\n    ".join(_specification(number, s) for number, s in enumerate(SPECIFICATIONS))
    parts.append(f"\nSpecification const kSPECIFICATIONS[] = {{\n    {specifications}}};\n")
    kernels = ",\n    ".join(_kernel(number, row, config) for number, row in enumerate(rows))
    parts.append(f"Kernel const kKERNELS[] = {{\n    {kernels}}};\n")
    parts.append(f"std::int32_t const kNUM_SPECIFICATIONS = {len(SPECIFICATIONS)};\n")
    parts.append(f"std::int32_t const kNUM_KERNELS = {len(rows)};\n\n}} // namespace furcate\n")
    return "".join(parts)


def _specification_arrays(number: int, specification: PluginSpecification) -> str:
    text = ""
    for name, entries in (("INPUTS", specification.inputs), ("OUTPUTS", specification.outputs)):
        items = ", ".join(f'{{"{e.name}", Type::{TYPES[e.dtype]}, {len(e.shape)}}}' for e in entries)
        text += f"TensorEntry const k{name}_{number}[] = {{{items}}};\n"
    items = ", ".join(f'{{"{e.name}", {str(e.kind is float).lower()}}}' for e in specification.attributes)
    return f"{text}AttributeEntry const kSETTINGS_{number}[] = {{{items}}};\n"


def _specification(number: int, s: PluginSpecification) -> str:
    counts = [len(s.inputs), len(s.outputs), len(s.attributes), len(s.scalars)]
    return (
        f'{{"{s.name}", kINPUTS_{number}, {counts[0]}, kOUTPUTS_{number}, {counts[1]}, '
        f"kSETTINGS_{number}, {counts[2]}, {counts[3]}}}"
    )


def _kernel(number: int, row: TableRow, config: NativeConfig) -> str:
    report = row.kernel.report
    is_bfloat16 = str(config.activation == "bf16").lower()
    return (
        f"{{{KINDS[row.kind]}, {row.arch}, {is_bfloat16}, {row.max_rows}, {row.block_size}, {32 * report.num_warps}, "
        f'{report.shared_bytes}, "{row.kernel.name}", furcateCubin{number}, kATTRIBUTES_{number}}}'
    )


def _number(value: float) -> str:
    return '__builtin_nan("")' if math.isnan(value) else repr(float(value))


def _embedded(number: int) -> str:
    symbol = f"furcateCubin{number}"
    return (
        f'.section .rodata\n.global {symbol}\n.hidden {symbol}\n.balign 64\n{symbol}: .incbin "kernel_{number}.cubin"\n'
    )


def _run(*command: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildError(
            f"{command[0]} is not installed; the C++ plugins are built with CMake 3.22 or newer."
        ) from error
    if result.returncode:
        raise BuildError(f"{' '.join(command[:3])} failed: {(result.stderr or result.stdout).strip()[-1500:]}")


def main() -> None:
    """Build from the command line; prints the library's path, or one sentence and exit code 2."""
    try:
        print(build_library(tyro.cli(NativeConfig)))
    except FurcateError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
