"""A process in which kernels run in triton's interpreter, whatever the process that asks has imported.

TRITON_INTERPRET counts at triton's import, so it cannot be switched on in a test process that may have imported triton.
Requests and replies are pickles on stdin and stdout, each behind its length in eight bytes.
"""

import os
import pickle
import struct
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from furcate.plugins.cache_commit.launch import launch_cache_commit, layer_addresses
from furcate.plugins.tree_attention.launch import LayerInputs, launch_tree_attention


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(out_ptr + i * 16 + j, tl.dot(tl.load(a_ptr + i * 16 + j), tl.load(b_ptr + i * 16 + j)))


def bf16_dot_error():
    """Largest error of tl.dot on bf16 ones: triton 3.6.0 multiplies the raw bits, 0x3F80 * 0x3F80 * 16."""
    ones, out = torch.ones(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    _dot[(1,)](ones, ones, out)
    return float((out - 16).abs().max())


@triton.jit
def _cast(x_ptr, out_ptr):
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.float8e4nv))


def fp8_cast_errors():
    """How many of 256 numbers from 1 to 2 are cast to another e4m3 value than torch's: triton 3.6.0 loses the carry."""
    x, out = torch.linspace(1, 2, 256), torch.empty(256, dtype=torch.float8_e4m3fn)
    _cast[(1,)](x, out)
    return int((out.float() != x.to(torch.float8_e4m3fn).float()).sum())


def mend_fp8_cast():
    """Round float32 to e4m3 as the device does, to nearest even."""
    unmended = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if dst_type.scalar != tl.float8e4nv or src.dtype.scalar != tl.float32:
            return unmended(self, src, dst_type, rounding_mode)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def mend_bf16_dot():
    """Let tl.dot see the values of bf16 operands instead of their bits."""

    def values(x):
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(values(a), values(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def attention(case, launch, pool, is_address=False):
    """(out, pool) of the kernel on that case; fp8 pages travel as bytes, since float8 cannot be pickled."""
    stored = pool.clone()
    pool = stored if case.kv_scales is None else stored.view(torch.float8_e4m3fn)
    inputs = LayerInputs(
        qkv=case.qkv,
        pool=layer_addresses(pool) if is_address else pool[0],
        page_size=case.shape.page_size,
        kv_dtype=pool.dtype,
        norms=case.norms,
        kv_scales=case.kv_scales,
    )
    return launch_tree_attention(inputs, case.batch, case.spec, case.rope, launch), stored


def commit(pool, page_table, cache_lengths, path, is_address):
    """(committed lengths, pool) of the commit kernel."""
    pool = pool.clone()
    addresses = layer_addresses(pool) if is_address else None
    return launch_cache_commit(pool, page_table, cache_lengths, path, addresses), pool


def serve():
    """Answer requests (function name, arguments) until stdin ends: (True, result) or (False, traceback)."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not lie between replies
    before = bf16_dot_error(), fp8_cast_errors()
    mend_bf16_dot()
    mend_fp8_cast()
    after = bf16_dot_error(), fp8_cast_errors()
    functions = {"attention": attention, "commit": commit, "errors_before_and_after_mending": lambda: (before, after)}
    while header := requests.read(8):
        name, arguments = pickle.loads(requests.read(struct.unpack("<Q", header)[0]))
        try:
            reply = (True, functions[name](**arguments))
        except Exception:
            reply = (False, traceback.format_exc())
        body = pickle.dumps(reply)
        replies.write(struct.pack("<Q", len(body)) + body)
        replies.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
