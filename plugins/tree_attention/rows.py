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
def row_offsets(page, row, PAGE: tl.constexpr, ROW_WIDTH: tl.constexpr):
    """int64 offset of a key row from the layer's base; the value row lies PAGE * ROW_WIDTH behind it."""
    return page.to(tl.int64) * (2 * PAGE * ROW_WIDTH) + row * ROW_WIDTH


@triton.jit
def key_dims(D: tl.constexpr, DP: tl.constexpr):
    """The head dim of each of the DP columns of q and k, and whether it is one: each half padded to DP / 2."""
    d = tl.arange(0, DP)
    if D == DP:
        return d, d < D
    else:
        within = d % (DP // 2)
        return d // (DP // 2) * (D // 2) + within, within < D // 2


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
    """float32 [rows, DP]: the heads at `row_ptrs`, normed and turned by their positions, columns as in `key_dims`."""
    if IS_FUSED:
        half = tl.arange(0, DP // 2)
        mask = is_row[:, None] & (half < D // 2)[None, :]
        x = tl.load(row_ptrs[:, None] + half[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(row_ptrs[:, None] + D // 2 + half[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_NORMS:
            factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + EPS)[:, None]
            x = x * factor * tl.load(norm_ptr + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
            y = y * factor * tl.load(norm_ptr + D // 2 + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]
        angle = positions.to(tl.int64)[:, None] * (D // 2) + half[None, :]
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        pairs = tl.join(x * cos - y * sin, y * cos + x * sin)
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), (x.shape[0], DP))
    else:
        d, is_d = key_dims(D, DP)
        return tl.load(row_ptrs[:, None] + d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0).to(tl.float32)
