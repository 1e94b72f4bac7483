"""The few INetworkDefinition calls that every emitted operation is made of: typed, named, and checked for failure.

Axes: B batch, N nodes. Tensors of activations are [B,N,width] with B and N dynamic; `leading` is their shape [2].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from furcate.builder.errors import BuildError
from furcate.builder.ops.tensorrt_versions import TensorRT

TYPE_NAMES = {
    torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16", torch.int32: "INT32",
    torch.int64: "INT64", torch.bool: "BOOL", torch.float8_e4m3fn: "FP8",
}  # fmt: skip


class Graph:
    """A network that is being emitted. `dtype` is the activations' type.

    `kept` holds the memory of every constant: TensorRT reads it only while it builds.
    """

    def __init__(self, tensorrt: TensorRT, network: Any, dtype: torch.dtype) -> None:
        self.tensorrt = tensorrt
        self.trt = tensorrt.module
        self.network = network
        self.dtype = dtype
        self.kept: list[Tensor] = []
        self.weight_names: list[str] = []
        self._scalars: dict[tuple, Any] = {}

    def type_of(self, dtype: torch.dtype) -> Any:
        """TensorRT's DataType of a torch dtype."""
        return getattr(self.trt.DataType, TYPE_NAMES[dtype])

    def output(self, layer: Any, name: str | None = None) -> Any:
        """The layer's first output; raises BuildError where TensorRT refused the layer."""
        if layer is None:
            raise BuildError(f"{self.tensorrt.label} refused a layer{f' ({name})' if name else ''}; see its log above.")
        if name is not None:
            layer.name = name
        return layer.get_output(0)

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """A network input; -1 stands for a dynamic size."""
        return self.network.add_input(name, self.type_of(dtype), tuple(shape))

    def mark_output(self, tensor: Any, name: str) -> None:
        """Makes `tensor` an output of the network."""
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, value: Tensor, name: str | None = None, shape: Sequence[int] | None = None) -> Any:
        """A constant; with a name its weights can be refitted."""
        value = value.detach().contiguous()
        self.kept.append(value)
        weights = self.trt.Weights(self.type_of(value.dtype), value.data_ptr(), value.numel())
        layer = self.network.add_constant(tuple(value.shape if shape is None else shape), weights)
        tensor = self.output(layer, name)
        if name is not None:
            self.network.set_weights_name(weights, name)
            self.weight_names.append(name)
        return tensor

    def scalar(self, value: float, dtype: torch.dtype, rank: int) -> Any:
        """A constant of one element that broadcasts against tensors of `rank`."""
        key = (value, dtype, rank)
        if key not in self._scalars:
            self._scalars[key] = self.constant(torch.full((1,) * rank, value, dtype=dtype))
        return self._scalars[key]

    def binary(self, kind: str, a: Any, b: Any) -> Any:
        """An element-wise operation of equal types and ranks."""
        return self.output(self.network.add_elementwise(a, b, getattr(self.trt.ElementWiseOperation, kind)))

    def unary(self, kind: str, x: Any) -> Any:
        """An element-wise function."""
        return self.output(self.network.add_unary(x, getattr(self.trt.UnaryOperation, kind)))

    def activation(self, kind: str, x: Any) -> Any:
        """An activation function."""
        return self.output(self.network.add_activation(x, getattr(self.trt.ActivationType, kind)))

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        """x in another type; itself where it is of that type."""
        kind = self.type_of(dtype)
        return x if x.dtype == kind else self.output(self.network.add_cast(x, kind))

    def matmul(self, a: Any, b: Any, transposes_b: bool = False) -> Any:
        """a @ b over the last two axes, leading ones broadcast."""
        kinds = self.trt.MatrixOperation
        kind = kinds.TRANSPOSE if transposes_b else kinds.NONE
        return self.output(self.network.add_matrix_multiply(a, kinds.NONE, b, kind))

    def reduce(self, kind: str, x: Any, axis: int, keeps: bool = True) -> Any:
        """A reduction over one axis."""
        return self.output(self.network.add_reduce(x, getattr(self.trt.ReduceOperation, kind), 1 << axis, keeps))

    def reshape(self, x: Any, shape: Sequence[int], order: Sequence[int] | None = None) -> Any:
        """x as `shape` (0 keeps a size, -1 is what is left), its axes put into `order` afterwards."""
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(shape)
        if order is not None:
            layer.second_transpose = tuple(order)
        return self.output(layer)

    def transpose(self, x: Any, order: Sequence[int]) -> Any:
        """x with its axes in `order`."""
        layer = self.network.add_shuffle(x)
        layer.first_transpose = tuple(order)
        return self.output(layer)

    def concat(self, parts: Sequence[Any], axis: int) -> Any:
        """Parts side by side along `axis`."""
        layer = self.network.add_concatenation(list(parts))
        layer.axis = axis
        return self.output(layer)

    def gather(self, x: Any, indices: Any, axis: int, num_elementwise: int = 0) -> Any:
        """x's entries `indices` along `axis`; with num_elementwise 1 each batch row has indices of its own."""
        layer = self.network.add_gather_v2(x, indices, self.trt.GatherMode.DEFAULT)
        layer.axis, layer.num_elementwise_dims = axis, num_elementwise
        return self.output(layer)

    def shape(self, x: Any) -> Any:
        """x's shape, an int64 shape tensor."""
        return self.output(self.network.add_shape(x))

    def last(self, x: Any, start: int, width: int) -> Any:
        """x[..., start : start + width]; the other axes may be dynamic."""
        rank = len(x.shape)
        size = self.concat([self.gather(self.shape(x), self.constant(torch.arange(rank - 1)), 0), self.sizes(width)], 0)
        zeros = (0,) * (rank - 1)
        layer = self.network.add_slice(x, (*zeros, start), (*zeros, width), (1,) * rank)
        layer.set_input(2, size)
        return self.output(layer)

    def sizes(self, *values: int) -> Any:
        """A constant shape tensor."""
        return self.constant(torch.tensor(values, dtype=torch.int64))

    def size(self, x: Any, axis: int) -> Any:
        """One size of x as a shape tensor [1]."""
        return self.gather(self.shape(x), self.sizes(axis), 0)
