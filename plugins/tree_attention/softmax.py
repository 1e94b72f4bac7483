"""Device code of the kernel: scores and the online softmax in base 2.

m row's greatest score so far, total its sum of weights, acc its weighted values.
"""

# Device code is Triton's language, whose constants and branches Python's types do not describe.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Below every score, yet finite: a row that attends nothing keeps exp2(m - m) = 1 instead of NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """[parts, rows, d of a part]: the heads in x [rows, d] cut into equal parts."""
    return tl.permute(tl.reshape(x, [x.shape[0], PARTS, x.shape[1] // PARTS]), [1, 0, 2])


@triton.jit
def dot_products(q, k, PRECISION: tl.constexpr, HEAD_PARTS: tl.constexpr):
    """float32 [rows, keys]: q.k. Parts of the head are a batch, which mma.sync spreads over warps: none holds all of q."""
    if HEAD_PARTS == 1:
        return tl.dot(q, tl.trans(k), input_precision=PRECISION)
    keys = tl.permute(in_parts(k, HEAD_PARTS), [0, 2, 1])
    return tl.sum(tl.dot(in_parts(q, HEAD_PARTS), keys, input_precision=PRECISION), 0)


@triton.jit
def attend_block(
    q, k, v, is_attended, m, total, acc, qk_scale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, HEAD_PARTS: tl.constexpr,
):  # fmt: skip
    """One online-softmax step (base 2) over a block of keys; `is_attended` None means all of them."""
    scores = dot_products(q, k, PRECISION, HEAD_PARTS) * qk_scale
    if SOFTCAP is not None:
        # tanh by exp2 of the argument that qk_scale already carries (2 log2e / softcap).
        scores = (SOFTCAP * LOG2E) * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if is_attended is not None:
        scores = tl.where(is_attended, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(scores - m_new[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, total, acc
