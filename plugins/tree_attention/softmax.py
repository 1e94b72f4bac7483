"""Device code of the kernel: the online softmax in base 2.

m row's greatest score so far, total its sum of weights, acc its weighted values.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Below every score, yet finite: a row that attends nothing keeps exp2(m - m) = 1 instead of NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def attend_block(q, k, v, is_attended, m, total, acc, qk_scale, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """One online-softmax step (base 2) over a block of keys; `is_attended` None means all of them."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
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
