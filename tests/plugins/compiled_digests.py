"""Digests of kernels compiled in a process of their own, as JSON: compiled_digests.py ROWS ARCH...

{arch: [PTX, cubin]}, with fp8 pages where the GPU has them; without the cubin where ptxas's addresses cannot be fixed.
"""

import hashlib
import json
import sys

from triton import knobs

from furcate.plugins.aot import compile_afresh, fixed_addresses
from furcate.plugins.tree_attention.aot import Variant, split_source
from furcate.plugins.tree_attention.op import FIRST_FP8_ARCH
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import choose_tactic

SPEC = AttentionSpec(num_query_heads=8, num_kv_heads=2, head_dim=64)


def digests(arch: int, rows: int) -> list[str]:
    """SHA-256 of PTX and cubin."""
    variant = Variant(has_fp8_pages=arch >= FIRST_FP8_ARCH)
    kernel = compile_afresh(split_source(SPEC, choose_tactic(arch, rows, SPEC.head_dim, 2), variant), arch)
    with fixed_addresses() as is_fixed:
        parts = (kernel.ptx.encode(), kernel.cubin) if is_fixed else (kernel.ptx.encode(),)
    return [hashlib.sha256(part).hexdigest() for part in parts]


if __name__ == "__main__":
    knobs.compilation.always_compile = True
    rows, *archs = map(int, sys.argv[1:])
    print(json.dumps({arch: digests(arch, rows) for arch in archs}))
