"""What the kernels become on each architecture: no spills, shared memory that fits, the matrix unit in use.

Compiled for real, without a GPU. A few representative kernels run by default, the whole table behind `slow`.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from furcate.builder.errors import ConfigError
from furcate.plugins.chips import CHIPS, chip_of, closest_chip
from furcate.plugins.specification import TREE_ATTENTION_SPLIT
from furcate.plugins.tree_attention.op import FIRST_FP8_ARCH
from furcate.plugins.tree_attention.spec import HEAD_DIMS, PAGE_SIZES, AttentionSpec
from furcate.plugins.tree_attention.tactics import (
    PLUGIN_SHARED_BYTES,
    PLUGIN_TACTICS,
    TACTICS,
    choose_tactic,
    fitting_lines,
)

triton = pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels cannot be compiled in this process", allow_module_level=True)

from furcate.plugins import aot  # noqa: E402
from furcate.plugins.cache_commit.aot import commit_source  # noqa: E402
from furcate.plugins.tensorrt_plugin import launchable_ptx  # noqa: E402
from furcate.plugins.tree_attention.aot import Variant, reduce_source, split_source  # noqa: E402


def spec_of(head_dim=128, **options) -> AttentionSpec:
    """Heads of Llama-3 8B."""
    return AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=head_dim, **options)


def attention_kernel(arch, tactic, variant, **options) -> aot.CompiledKernel:
    return aot.compile_kernel(split_source(spec_of(**options), tactic, variant), arch)


def check_budgets(kernel: aot.CompiledKernel) -> None:
    report = kernel.report
    chip = chip_of(report.arch)
    assert report.stack_bytes == 0
    if report.opcodes is not None:
        assert report.opcodes["LDL"] == report.opcodes["STL"] == 0
    assert report.registers <= 255
    assert report.fits, f"{report.shared_bytes} B of shared memory"
    assert report.ctas_per_sm >= 1
    assert f".version {chip.ptx_version // 10}.{chip.ptx_version % 10}\n" in kernel.ptx
    assert re.search(rf"\.target sm_{report.arch}a?\n", kernel.ptx)


def check_attention(kernel: aot.CompiledKernel, rows: int, widest_copy: int = 16) -> None:
    check_budgets(kernel)
    expected = chip_of(kernel.report.arch).matrix_opcode if rows > 32 else "HMMA"
    if kernel.report.opcodes is not None:
        assert kernel.report.opcodes[expected] > 0, kernel.report.opcodes.most_common(12)
    instruction = {"HMMA": "mma.sync", "HGMMA": "wgmma.mma_async", "UTCHMMA": "tcgen05.mma"}[expected]
    assert instruction in kernel.ptx
    # K/V reached by address is still copied asynchronously, sixteen bytes at a time.
    assert max(copy_bytes(kernel)) == widest_copy


def copy_bytes(kernel: aot.CompiledKernel) -> set[int]:
    """Bytes of the asynchronous copies."""
    return {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+)", kernel.ptx)}


KERNELS = {
    "sm_90, 16 rows": (90, 16, Variant(), {}),
    "sm_90, 32 rows": (90, 32, Variant(), {}),
    "sm_90, 64 rows": (90, 64, Variant(), {}),
    "sm_90, 128 rows": (90, 128, Variant(), {}),
    "sm_90, 64 rows, fp8 pages": (90, 64, Variant(has_fp8_pages=True), {}),
    "sm_90, 64 rows, head_dim 256": (90, 64, Variant(), {"head_dim": 256}),
    "sm_90, 64 rows, head_dim 80, norms, page 16": (90, 64, Variant(has_norms=True, page_size=16), {"head_dim": 80}),
    "sm_90, prompt chunk": (90, 2048, Variant(is_chain=True, is_single=True), {}),
    "sm_90, a level of a tree": (90, 32, Variant(has_offset=True, is_single=True), {}),
    "sm_90, window and soft cap, fp16": (90, 64, Variant(activation="fp16"), {"sliding_window": 4096, "softcap": 50.0}),
    "sm_90, float32": (90, 64, Variant(activation="fp32"), {"head_dim": 64}),
    "sm_90, float32, head_dim 256": (90, 64, Variant(activation="fp32"), {"head_dim": 256}),
    "sm_120, float32, head_dim 80": (120, 64, Variant(activation="fp32"), {"head_dim": 80}),
    "sm_100, 16 rows": (100, 16, Variant(), {}),
    "sm_100, 64 rows": (100, 64, Variant(), {}),
    "sm_100, 128 rows": (100, 128, Variant(), {}),
    "sm_103, 64 rows": (103, 64, Variant(), {}),
    "sm_120, 64 rows": (120, 64, Variant(), {}),
    "sm_80, 16 rows": (80, 16, Variant(), {}),
    "sm_89, 32 rows": (89, 32, Variant(), {}),
}


@pytest.mark.parametrize(("arch", "rows", "variant", "options"), KERNELS.values(), ids=KERNELS.keys())
def test_attention_kernel_is_within_its_budgets(arch, rows, variant, options):
    element_bytes = 4 if variant.activation == "fp32" else 2
    tactic = choose_tactic(arch, rows, spec_of(**options).head_dim, element_bytes)
    kernel = attention_kernel(arch, tactic, variant, **options)
    check_attention(kernel, rows if element_bytes == 2 else 1)
    if tactic.num_stages > 2:
        # The loop waits for the tile it needs while those behind it stay in flight.
        assert re.search(r"cp\.async\.wait_group\s+[1-9]", kernel.ptx)


@pytest.mark.parametrize(("name", "is_read"), [("sm_90, prompt chunk", False), ("sm_90, a level of a tree", True)])
def test_prompt_chunk_never_reads_the_mask(name, is_read):
    arch, rows, variant, _ = KERNELS[name]
    kernel = attention_kernel(arch, choose_tactic(arch, rows, 128, 2), variant)
    position = TREE_ATTENTION_SPLIT.kernel_arguments.index("tree_mask_ptr")
    assert (f"[tree_attention_split_param_{position}]" in kernel.ptx) == is_read


@pytest.mark.parametrize(("arch", "rows", "expected"), [(90, 32, {8, 16}), (120, 64, {8, 16}), (90, 64, {16})])
def test_fp8_values_are_copied_by_eight_bytes_with_warp_level_instructions(arch, rows, expected):
    kernel = attention_kernel(arch, choose_tactic(arch, rows, 128, 2), Variant(has_fp8_pages=True))
    assert copy_bytes(kernel) == expected


@pytest.mark.parametrize(("arch", "rows"), [(90, 16), (90, 64), (100, 64), (120, 64)])
def test_plugin_tactic_needs_no_more_than_48_kilobytes(arch, rows):
    kernel = attention_kernel(arch, choose_tactic(arch, rows, 128, 2, PLUGIN_TACTICS), Variant())
    check_attention(kernel, rows)
    assert kernel.report.shared_bytes <= PLUGIN_SHARED_BYTES


@pytest.mark.parametrize("arch", [90, 100])
def test_reduce_and_commit_kernels_are_within_their_budgets(arch):
    for source in (reduce_source(spec_of(), "bf16", 33), commit_source(1024, 64, 8, 2)):
        kernel = aot.compile_kernel(source, arch)
        check_budgets(kernel)
        assert kernel.report.shared_bytes <= PLUGIN_SHARED_BYTES


def test_commit_reads_everything_before_it_writes():
    kernel = aot.compile_kernel(commit_source(1024, 64, 8, 2), 90)
    moves = re.findall(r"(ld\.global\.v4|bar\.sync|st\.global\.v4)", kernel.ptx)
    barrier = moves.index("bar.sync")
    assert set(moves[:barrier]) == {"ld.global.v4"}
    assert set(moves[barrier + 1 :]) == {"st.global.v4"}


def compiled_digests(rows: int, archs: tuple[int, ...]) -> dict:
    """What tests/plugins/compiled_digests.py prints."""
    script = Path(__file__).with_name("compiled_digests.py")
    command = [sys.executable, str(script), str(rows), *map(str, archs)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("archs", [(89, 100), pytest.param(tuple(CHIPS), marks=pytest.mark.slow)])
def test_second_compile_gives_the_same_bytes(archs):
    """In another process, and in the opposite order: triton 3.6.0 remembers some choices of the first architecture."""
    first, second = compiled_digests(64, archs), compiled_digests(64, archs[::-1])
    assert first.keys() == second.keys() == {str(arch) for arch in archs}
    assert first == second


def test_opcodes_are_counted_without_predicates_and_modifiers():
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000f00 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;       /* 0x0000000402048981 */
        /*0020*/             @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;            /* 0x0000000104049890 */
        /*0030*/                   LDG.E R8, desc[UR4][R6.64] ;           /* 0x0000000406087981 */
    """
    assert aot.opcodes_of(sass) == Counter({"LDG": 2, "LDC": 1, "UIADD3": 1})


def test_ctas_per_sm_takes_the_scarcest_resource():
    def ctas(registers, shared, tensor_memory=0):
        return aot.KernelReport(
            arch=100, registers=registers, stack_bytes=0, shared_bytes=shared, tensor_memory_columns=tensor_memory,
            num_warps=4, opcodes=Counter(),
        ).ctas_per_sm  # fmt: skip

    assert ctas(32, 0) == 16  # 2048 threads
    assert ctas(168, 0) == 3  # 65,536 registers / (4 warps x 5,376)
    assert ctas(32, 114_688) == 2  # 233,472 B / (114,688 + 1,024)
    assert ctas(32, 0, tensor_memory=256) == 2


def test_unknown_architectures_are_named():
    with pytest.raises(ConfigError, match=r"sm_70 is not known; the kernels are compiled for \[80, 89, 90"):
        aot.compile_kernel(commit_source(1024, 64, 8, 2), 70)
    with pytest.raises(ConfigError, match="sm_75; the kernels need sm_80"):
        closest_chip(75)
    assert closest_chip(86).arch == 80
    assert closest_chip(121).arch == 120


ACTIVATION_OF = {2: "bf16", 4: "fp32"}


def table_lines(table):
    return [
        (arch, head_dim, line)
        for arch in CHIPS
        for head_dim in HEAD_DIMS
        for element_bytes in ACTIVATION_OF
        for line in fitting_lines(table, arch, head_dim, element_bytes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim", "line"), table_lines(TACTICS))
@pytest.mark.parametrize("has_fp8_pages", [False, True])
def test_whole_table_is_within_its_budgets(arch, head_dim, line, has_fp8_pages):
    if has_fp8_pages and arch < FIRST_FP8_ARCH:
        pytest.skip(f"sm_{arch} does not convert e4m3")
    variant = Variant(activation=ACTIVATION_OF[line.element_bytes], has_fp8_pages=has_fp8_pages)
    kernel = attention_kernel(arch, line.tactic, variant, head_dim=head_dim)
    # Pages of fp8 under float32: a tile of 16 keys of 128 bytes has eight for each thread of eight warps.
    is_small_tile = variant == Variant(activation="fp32", has_fp8_pages=True) and 64 < head_dim <= 128
    rows = line.max_rows or 4096 if line.element_bytes == 2 else 1
    check_attention(kernel, rows, widest_copy=8 if is_small_tile else 16)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim", "line"), table_lines(PLUGIN_TACTICS))
@pytest.mark.parametrize("has_fp8_pages", [False, True])
def test_whole_plugin_table_is_within_48_kilobytes(arch, head_dim, line, has_fp8_pages):
    if has_fp8_pages and arch < FIRST_FP8_ARCH:
        pytest.skip(f"sm_{arch} does not convert e4m3")
    kernel = attention_kernel(arch, line.tactic, Variant(has_fp8_pages=has_fp8_pages), head_dim=head_dim)
    check_attention(kernel, line.max_rows or line.tactic.block_m)
    assert kernel.report.shared_bytes <= PLUGIN_SHARED_BYTES
    assert launchable_ptx(kernel)  # reads none of triton's hidden parameters


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_every_page_size_is_within_its_budgets(page_size, rows):
    check_attention(attention_kernel(90, choose_tactic(90, rows, 128, 2), Variant(page_size=page_size)), rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 120])
def test_ctas_per_sm_of_the_table(arch):
    """What choose_splits counts on, for the largest head_dim of every line."""
    for line in (*TACTICS, *PLUGIN_TACTICS):
        if line.is_wide not in (None, chip_of(arch).has_wide_matrix_unit):
            continue
        variant = Variant(activation=ACTIVATION_OF[line.element_bytes])
        kernel = attention_kernel(arch, line.tactic, variant, head_dim=line.max_head_dim)
        assert kernel.report.ctas_per_sm >= line.tactic.ctas_per_sm, line
