"""Device code of the kernel: rows of q and k, rotated, and rows of the pool's pages.

D head_dim; DP head_dim padded to a power of two.
"""

# Device code is Triton's language, whose constants and branches Python's types do not describe.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def pool_base(kv_pool_ptr, layer, KV_DTYPE: tl.constexpr):
    """Pointer to the layer's pages: `kv_pool_ptr` holds int64 addresses by layer, or is the layer itself."""
    if kv_pool_ptr.dtype.element_ty != tl.int64:
        return kv_pool_ptr
    # A loaded address has lost its alignment, without which K/V would be copied two bytes at a time.
    return tl.multiple_of(tl.load(kv_pool_ptr + layer).to(tl.pointer_type(KV_DTYPE)), 16)


@triton.jit
def row_pointers(pool, page, row, DP: tl.constexpr, PAGE: tl.constexpr, ROW_WIDTH: tl.constexpr):
    """Pointers [rows, DP] to keys and to values: row `row` of page `page`, values PAGE rows behind the keys."""
    offset = page.to(tl.int64) * (2 * PAGE * ROW_WIDTH) + row * ROW_WIDTH
    keys = pool + offset[:, None] + tl.arange(0, DP)[None, :]
    return keys, keys + PAGE * ROW_WIDTH


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """x in the activations' type. e4m3 goes through float16, which holds all its values: Triton 3.6.0 settles the direct
    cast to bfloat16 once a process, for whichever architecture is compiled first.
    """
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x.to(DTYPE)


@triton.jit
def rotated_rows(
    row_ptrs,
    positions,
    is_row,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    D: tl.constexpr,
    DP: tl.constexpr,
    EPS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    IS_FUSED: tl.constexpr,
):
    """float32 [rows, DP]: the heads at `row_ptrs`, normed and turned by their positions; zero behind head_dim."""
    d = tl.arange(0, DP)
    mask = is_row[:, None] & (d < D)[None, :]
    x = tl.load(row_ptrs[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if IS_FUSED:
        # The other half is loaded rather than moved between threads; a choice, unlike a remainder, keeps loads wide.
        partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
        y = tl.load(row_ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_NORMS:
            factor = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
            x = x * factor * tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            y = y * factor * tl.load(norm_ptr + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
        angle = positions.to(tl.int64)[:, None] * (D // 2) + tl.where(d < D // 2, d, partner)[None, :]
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        x = x * cos + y * tl.where(d < D // 2, -sin, sin)
    return x
