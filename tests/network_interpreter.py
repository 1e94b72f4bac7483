"""Evaluates an INetworkDefinition with torch, layer by layer: what TensorRT was told to compute, without a GPU.

Each layer kind's meaning is taken from NVIDIA's operator documentation, not from the code that emits it. Kinds that no
network of ours contains are an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TORCH_TYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32,
    "INT64": torch.int64, "BOOL": torch.bool, "FP8": torch.float8_e4m3fn, "INT4": torch.int8,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "EQUAL": torch.eq,
    "LESS": torch.lt,
    "GREATER": torch.gt,
}
ACTIVATIONS = {
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "GELU_TANH": lambda x: F.gelu(x, approximate="tanh"),
}
UNARY = {"SQRT": torch.sqrt}
REDUCTIONS = {"AVG": torch.mean, "SUM": torch.sum}


class NetworkInterpreter:
    """Runs a network made with `trt` (tensorrt_rtx).

    `kept` is the memory of its constants, in order: numpy has no types for fp8 and int4, so the bindings do not show them.
    """

    def __init__(self, trt: Any, network: Any, kept: Sequence[Tensor] = ()) -> None:
        self.trt = trt
        self.network = network
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        constants = [layer.name for layer in layers if layer.type.name == "CONSTANT"]
        self.kept = dict(zip(constants, kept, strict=True)) if kept else {}
        self._masked: dict[str, bool] = {}

    @torch.inference_mode()
    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name. Every input is checked against the network's type and shape."""
        values: dict[str, Tensor] = {}
        for index in range(self.network.num_inputs):
            tensor = self.network.get_input(index)
            value = inputs[tensor.name]
            assert value.dtype == TORCH_TYPES[tensor.dtype.name], f"{tensor.name} is {value.dtype}"
            fits = len(value.shape) == len(tensor.shape) and all(
                want in (-1, have) for want, have in zip(tensor.shape, value.shape, strict=True)
            )
            assert fits, f"{tensor.name} is {tuple(value.shape)}, the network wants {tuple(tensor.shape)}"
            values[tensor.name] = value
        assert set(inputs) == set(values), f"no such inputs: {set(inputs) - set(values)}"
        for index in range(self.network.num_layers):
            self._run(self.network.get_layer(index), values)
        outputs = [self.network.get_output(index).name for index in range(self.network.num_outputs)]
        return {name: values[name] for name in outputs}

    def _run(self, layer: Any, values: dict[str, Tensor]) -> None:
        tensors = [layer.get_input(index) for index in range(layer.num_inputs)]
        operands = [None if tensor is None else values[tensor.name] for tensor in tensors]
        results = getattr(self, f"_{layer.type.name.lower()}")(layer, *operands)
        results = results if isinstance(results, tuple) else (results,)
        for index, result in enumerate(results):
            output = layer.get_output(index)
            assert layer.type.name == "ATTENTION_INPUT" or result.dtype == TORCH_TYPES[output.dtype.name], (
                f"{layer.name}: TensorRT says {output.dtype}, evaluated {result.dtype}"
            )
            values[output.name] = result

    def _as(self, layer: Any, kind: str) -> Any:
        layer.__class__ = getattr(self.trt, kind)
        return layer

    def _constant(self, layer: Any) -> Tensor:
        layer = self._as(layer, "IConstantLayer")
        kind = layer.get_output(0).dtype.name
        if kind in ("FP8", "INT4") and self.kept:
            return self._few_bits(kind, self.kept[layer.name], tuple(layer.shape))
        assert kind not in ("BF16", "FP8", "INT4"), f"{layer.name}: numpy has no {kind}; evaluate the float32 network"
        value = torch.from_numpy(np.array(layer.weights, copy=True))
        return value.reshape(tuple(layer.shape))

    def _few_bits(self, kind: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """float8 as it is; int4 as int8, two to a byte, the first in the low four bits (NVIDIA's documentation of INT4)."""
        if kind == "FP8":
            assert value.dtype == torch.float8_e4m3fn and value.numel() == np.prod(shape)
            return value.reshape(shape)
        assert value.dtype == torch.uint8 and 2 * value.numel() == np.prod(shape)
        nibbles = torch.stack([value & 15, value >> 4], dim=-1).to(torch.int8).reshape(shape)
        return torch.where(nibbles > 7, nibbles - 16, nibbles)

    def _dequantize(self, layer: Any, x: Tensor, scale: Tensor) -> Tensor:
        """x times its scale: one for all, one along an axis, or one a block of every axis."""
        if scale.ndim == 1:
            axis = self._as(layer, "IDequantizeLayer").axis
            scale = scale.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        elif scale.ndim == x.ndim:
            for axis in range(x.ndim):
                scale = scale.repeat_interleave(x.shape[axis] // scale.shape[axis], axis)
        return x.to(scale.dtype) * scale

    def _cast(self, layer: Any, x: Tensor) -> Tensor:
        return x.to(TORCH_TYPES[self._as(layer, "ICastLayer").to_type.name])

    def _elementwise(self, layer: Any, a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype and a.ndim == b.ndim, f"{layer.name}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        return BINARY[self._as(layer, "IElementWiseLayer").op.name](a, b)

    def _unary(self, layer: Any, x: Tensor) -> Tensor:
        return UNARY[self._as(layer, "IUnaryLayer").op.name](x)

    def _activation(self, layer: Any, x: Tensor) -> Tensor:
        # ILayer.type and IActivationLayer.type share a name: the class decides which one is read.
        return ACTIVATIONS[self._as(layer, "IActivationLayer").type.name](x)

    def _matrix_multiply(self, layer: Any, a: Tensor, b: Tensor) -> Tensor:
        layer = self._as(layer, "IMatrixMultiplyLayer")
        assert layer.op0.name == "NONE"
        return a @ (b.transpose(-1, -2) if layer.op1.name == "TRANSPOSE" else b)

    def _reduce(self, layer: Any, x: Tensor) -> Tensor:
        layer = self._as(layer, "IReduceLayer")
        axes = [axis for axis in range(x.ndim) if layer.axes >> axis & 1]
        return REDUCTIONS[layer.op.name](x, dim=axes, keepdim=layer.keep_dims)

    def _softmax(self, layer: Any, x: Tensor) -> Tensor:
        axes = self._as(layer, "ISoftMaxLayer").axes
        return torch.softmax(x, dim=axes.bit_length() - 1)

    def _shuffle(self, layer: Any, x: Tensor, dynamic_shape: Tensor | None = None) -> Tensor:
        layer = self._as(layer, "IShuffleLayer")
        x = x.permute(*list(layer.first_transpose)[: x.ndim])
        shape = layer.reshape_dims if dynamic_shape is None else dynamic_shape.tolist()
        if shape is not None:  # None: a transpose alone
            copied = [x.shape[axis] if size == 0 else int(size) for axis, size in enumerate(shape)]
            x = x.reshape(copied)
        return x.permute(*list(layer.second_transpose)[: x.ndim])

    def _concatenation(self, layer: Any, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=self._as(layer, "IConcatenationLayer").axis)

    def _shape(self, layer: Any, x: Tensor) -> Tensor:
        return torch.tensor(x.shape, dtype=torch.int64)

    def _slice(self, layer: Any, x: Tensor, start: Any = None, size: Tensor | None = None, *rest: Any) -> Tensor:
        layer = self._as(layer, "ISliceLayer")
        assert start is None and not rest and set(layer.stride) == {1}
        sizes = list(layer.shape) if size is None else size.tolist()
        ends = [first + count for first, count in zip(layer.start, sizes, strict=True)]
        assert all(end <= whole for end, whole in zip(ends, x.shape, strict=True)), f"{layer.name}: out of {x.shape}"
        return x[tuple(slice(first, end) for first, end in zip(layer.start, ends, strict=True))]

    def _gather(self, layer: Any, data: Tensor, indices: Tensor) -> Tensor:
        layer = self._as(layer, "IGatherLayer")
        assert layer.mode.name == "DEFAULT"
        assert bool((indices >= 0).all()) and bool((indices < data.shape[layer.axis]).all()), f"{layer.name}: index"
        if layer.num_elementwise_dims == 0:
            taken = data.index_select(layer.axis, indices.flatten().long())
            return taken.unflatten(layer.axis, indices.shape) if indices.ndim != 1 else taken
        assert layer.num_elementwise_dims == 1 and layer.axis == 1
        return torch.stack([row.index_select(0, index.flatten().long()).reshape(*index.shape, *row.shape[1:])
                            for row, index in zip(data, indices, strict=True)])  # fmt: skip

    def _select(self, layer: Any, condition: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where(condition, then, otherwise)

    def _cumulative(self, layer: Any, x: Tensor, axis: Tensor) -> Tensor:
        layer = self._as(layer, "ICumulativeLayer")
        assert layer.op.name == "SUM" and not layer.reverse
        total = x.cumsum(int(axis)).to(x.dtype)
        return total - x if layer.exclusive else total

    def _topk(self, layer: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        layer = self._as(layer, "ITopKLayer")
        assert layer.op.name == "MAX" and not rest
        top = x.topk(layer.k, dim=layer.axes.bit_length() - 1)
        return top.values, top.indices.int()

    def _one_hot(self, layer: Any, indices: Tensor, values: Tensor, depth: Tensor) -> Tensor:
        assert self._as(layer, "IOneHotLayer").axis == indices.ndim
        return values[F.one_hot(indices.long(), int(depth))]

    def _rotary_embedding(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        layer = self._as(layer, "IRotaryEmbeddingLayer")
        assert not layer.interleaved and layer.rotary_embedding_dim == x.shape[-1]
        cos, sin = cos[positions.long()][:, None], sin[positions.long()][:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    def _kv_cache_update(self, layer: Any, cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
        cache = cache.clone()
        for row, start in enumerate(write_indices.tolist()):
            assert start + update.shape[2] <= cache.shape[2], f"{layer.name}: rows behind the cache's end"
            cache[row, :, start : start + update.shape[2]] = update[row]
        return cache

    def _attention_input(self, layer: Any, *operands: Tensor) -> Tensor:
        """IAttention without scale: softmax(q k^T, true where the mask allows) v, query heads grouped per KV head."""
        query, key, value, mask = operands
        assert mask.dtype == torch.bool and bool(mask.any(-1).all()), "a node that attends nothing"
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        return weights @ value.repeat_interleave(group, 1)

    def _attention_output(self, layer: Any, out: Tensor) -> Tensor:
        return out
