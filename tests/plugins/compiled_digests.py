"""Digests of kernels compiled in a process of their own: compiled_digests.py ROWS ARCH..., as JSON {arch: [bf16, fp8]}."""

import hashlib
import json
import sys

from triton import knobs

from furcate.plugins.aot import compile_afresh
from furcate.plugins.tree_attention.aot import Variant, split_source
from furcate.plugins.tree_attention.op import FIRST_FP8_ARCH
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import choose_tactic

SPEC = AttentionSpec(num_query_heads=8, num_kv_heads=2, head_dim=64)


def digests(arch: int, rows: int) -> list[str]:
    """SHA-256 of PTX and cubin, with pages in bf16 and, where the GPU has it, in fp8."""
    found = []
    for has_fp8_pages in (False, True) if arch >= FIRST_FP8_ARCH else (False,):
        tactic = choose_tactic(arch, rows, SPEC.head_dim, 2)
        kernel = compile_afresh(split_source(SPEC, tactic, Variant(has_fp8_pages=has_fp8_pages)), arch)
        found.append(hashlib.sha256(kernel.ptx.encode() + kernel.cubin).hexdigest())
    return found


if __name__ == "__main__":
    knobs.compilation.always_compile = True
    rows, *archs = map(int, sys.argv[1:])
    print(json.dumps({arch: digests(arch, rows) for arch in archs}))
