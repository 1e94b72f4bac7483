"""The named weights of an emitted network: constants that can be refitted by name, or inputs shared between plans.

A linear layer's weight may be quantised (weight-only): the constant is then in 8 or 4 bits and a dequantise layer follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from furcate.builder.errors import BuildError
from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.ops.tensorrt_graph import Graph


class NamedWeights:
    """Emits weights once each.

    `shared` are names that the network reads from inputs instead of constants; `aliases` are second names of a weight (a tied
    lm_head is the embedding).
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Tensor | QuantisedWeight],
        shared: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.graph = graph
        self._weights = weights
        self._aliases = dict(aliases or {})
        self._emitted: dict[str, Any] = dict(shared or {})

    def __contains__(self, name: str) -> bool:
        name = self._aliases.get(name, name)
        return name in self._weights or name in self._emitted

    def emitted(self, name: str, rank: int) -> Any:
        """The weight with leading axes of size 1 up to `rank`, in the activations' type.

        Raises BuildError where the network asks for a weight that the checkpoint has not.
        """
        name = self._aliases.get(name, name)
        if name not in self._emitted:
            value = self._weights.get(name)
            if value is None:
                raise BuildError(f"the network needs {name}; the checkpoint has no such weight.")
            is_plain = isinstance(value, Tensor)
            self._emitted[name] = (
                self.graph.constant(value.to(self.graph.dtype), name) if is_plain else self._dequantise(name, value)
            )
        tensor = self._emitted[name]
        shape = tuple(tensor.shape)
        return tensor if len(shape) == rank else self.graph.reshape(tensor, (1,) * (rank - len(shape)) + shape)

    def _dequantise(self, name: str, weight: QuantisedWeight) -> Any:
        graph = self.graph
        scales = weight.scales.to(graph.dtype)
        # One scale for all is a scalar to TensorRT; blocks of int4 keep their two axes.
        scales = graph.constant(scales.squeeze() if scales.numel() == 1 else scales, f"{name}.scales")
        values = self._packed(name, weight, weight.shape)
        layer = graph.network.add_dequantize(values, scales, graph.type_of(graph.dtype))
        if not weight.is_int4 and weight.scales.numel() > 1:
            layer.axis = 0
        return graph.output(layer, f"{name}.dequantize")

    def _packed(self, name: str, weight: QuantisedWeight, shape: tuple[int, int]) -> Any:
        graph = self.graph
        if not weight.is_int4:
            return graph.constant(weight.values, name)
        value = weight.values.contiguous()
        graph.kept.append(value)
        packed = graph.trt.Weights(graph.trt.DataType.INT4, value.data_ptr(), shape[0] * shape[1])
        tensor = graph.output(graph.network.add_constant(shape, packed), name)
        graph.network.set_weights_name(packed, name)
        graph.weight_names.append(name)
        return tensor
