"""Emits a target with plugin attention into a network that records, with TensorRT's real bindings; prints JSON.

Usage: tensorrt_recording.py <folder of the unpacked bindings>, with LD_LIBRARY_PATH naming the stub's folder.
Every call is held against the signature of the real method; plugins go through TensorRT's own registration and creator.
Replaced is only what the library itself would provide: tensors, the network, and the plugin registry.
"""

# ruff: noqa: E402

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as trt

sys.modules["tensorrt"] = trt


class RecordedTensor:
    """An ITensor: its type and shape, and what made it."""

    def __init__(self, name, dtype, shape):
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)


trt.ITensor = RecordedTensor
import tensorrt_bindings.plugin as trtp

sys.modules["tensorrt.plugin"] = trtp
creators = {}
trt.get_plugin_registry = lambda: SimpleNamespace(
    register_creator=lambda creator, namespace: creators.setdefault((creator.name, namespace), creator),
    get_creator=lambda name, version, namespace: creators[name, namespace],
)

from furcate.builder.errors import BuildError
from furcate.builder.network.spec import DecoderSpec
from furcate.builder.ops.tensorrt_plugin import PluginSettings, registered_plugins
from furcate.builder.ops.tensorrt_versions import TensorRT
from furcate.builder.ops.torch import RopeTables
from furcate.builder.tensor_parallel import rank_spec, rank_weights
from furcate.builder.tensorrt_networks import EmissionContext, emit_target
from furcate.plugins.tree_attention.spec import RopeTable


def parameters(method):
    """Names of a real method's parameters after self, of each overload, and how many are required."""
    text = getattr(trt.INetworkDefinition, method).__doc__
    overloads = re.findall(rf"{method}\(self: [^,)]+(?:, (.*?))?\) -> ", text)
    found = [re.findall(r"(?:^|, )(\w+): [^=,]*(=)?", overload) for overload in overloads]
    return [[(name, bool(default)) for name, default in overload] for overload in found]


def check_signature(method, positional, named):
    """Fails where the bindings would refuse the call."""
    for overload in parameters(method):
        names = [name for name, _ in overload]
        required = [name for name, has_default in overload if not has_default]
        given = names[: len(positional)] + list(named)
        if len(positional) <= len(names) and set(required) <= set(given) <= set(names):
            return
    raise TypeError(f"{method} takes {parameters(method)}, given {len(positional)} and {list(named)}")


class RecordedLayer:
    """A layer: attributes that are set on it are recorded, and must exist on the real class."""

    def __init__(self, network, kind, inputs, outputs):
        real = getattr(trt, f"I{kind}Layer")
        object.__setattr__(self, "record", {"kind": kind, "inputs": [t.name for t in inputs], "set": {}})
        object.__setattr__(self, "real", real)
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "inputs", list(inputs))
        network.records.append(self.record)

    def __setattr__(self, name, value):
        assert hasattr(self.real, name), f"{self.real.__name__} has no {name}"
        self.record["set"][name] = str(value)
        if name == "reshape_dims":
            shape = [self.inputs[0].shape[i] if size == 0 else size for i, size in enumerate(value)]
            self.outputs[0].shape = tuple(shape)
        if name in ("first_transpose", "second_transpose"):
            self.outputs[0].shape = tuple(self.outputs[0].shape[i] for i in value)
        if name == "axis" and self.record["kind"] == "Gather":
            data, indices = self.inputs
            self.outputs[0].shape = data.shape[:value] + indices.shape + data.shape[value + 1 :]
        if name == "num_elementwise_dims" and value == 1:
            self.outputs[0].shape = self.inputs[1].shape + self.inputs[0].shape[2:]
        if name == "axis" and self.record["kind"] == "Concatenation":
            shape = list(self.inputs[0].shape)
            shape[value] = sum(tensor.shape[value] for tensor in self.inputs)
            self.outputs[0].shape = tuple(shape)

    def set_input(self, index, tensor):
        assert hasattr(self.real, "set_input")
        self.record["inputs"] += [tensor.name]
        self.record["set"][f"input {index}"] = tensor.name

    def get_output(self, index):
        return self.outputs[index]


class RecordingNetwork:
    """An INetworkDefinition that knows shapes and types, and writes down every call."""

    def __init__(self):
        self.records, self.tensors, self.marked, self.named_weights = [], [], [], []

    def tensor(self, dtype, shape, name=None):
        made = RecordedTensor(name or f"t{len(self.tensors)}", dtype, shape)
        self.tensors.append(made)
        return made

    def add_input(self, name, dtype, shape):
        check_signature("add_input", (name, dtype, shape), {})
        self.records.append({"kind": "input", "name": name, "dtype": dtype.name, "shape": list(shape)})
        return self.tensor(dtype, shape, name)

    def mark_output(self, tensor):
        self.marked.append({"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)})

    def set_weights_name(self, weights, name):
        check_signature("set_weights_name", (weights, name), {})
        self.named_weights.append(name)
        return True

    def _layer(self, method, kind, arguments, inputs, outputs):
        check_signature(method, arguments, {})
        return RecordedLayer(self, kind, inputs, outputs)

    def add_constant(self, shape, weights):
        return self._layer("add_constant", "Constant", (shape, weights), [], [self.tensor(weights.dtype, shape)])

    def add_elementwise(self, a, b, op):
        assert a.dtype == b.dtype and len(a.shape) == len(b.shape), f"{op}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        shape = [-1 if -1 in pair else max(pair) for pair in zip(a.shape, b.shape, strict=True)]
        return self._layer("add_elementwise", "ElementWise", (a, b, op), [a, b], [self.tensor(a.dtype, shape)])

    def add_unary(self, x, op):
        return self._layer("add_unary", "Unary", (x, op), [x], [self.tensor(x.dtype, x.shape)])

    def add_activation(self, x, kind):
        return self._layer("add_activation", "Activation", (x, kind), [x], [self.tensor(x.dtype, x.shape)])

    def add_cast(self, x, dtype):
        return self._layer("add_cast", "Cast", (x, dtype), [x], [self.tensor(dtype, x.shape)])

    def add_matrix_multiply(self, a, op_a, b, op_b):
        assert a.dtype == b.dtype
        columns = b.shape[-2] if op_b == trt.MatrixOperation.TRANSPOSE else b.shape[-1]
        outputs = [self.tensor(a.dtype, (*a.shape[:-1], columns))]
        return self._layer("add_matrix_multiply", "MatrixMultiply", (a, op_a, b, op_b), [a, b], outputs)

    def add_reduce(self, x, op, axes, keeps):
        shape = [1 if axes >> axis & 1 else size for axis, size in enumerate(x.shape)]
        return self._layer("add_reduce", "Reduce", (x, op, axes, keeps), [x], [self.tensor(x.dtype, shape)])

    def add_shuffle(self, x):
        return self._layer("add_shuffle", "Shuffle", (x,), [x], [self.tensor(x.dtype, x.shape)])

    def add_concatenation(self, parts):
        outputs = [self.tensor(parts[0].dtype, parts[0].shape)]
        return self._layer("add_concatenation", "Concatenation", (parts,), parts, outputs)

    def add_gather_v2(self, data, indices, mode):
        outputs = [self.tensor(data.dtype, data.shape)]
        return self._layer("add_gather_v2", "Gather", (data, indices, mode), [data, indices], outputs)

    def add_shape(self, x):
        return self._layer("add_shape", "Shape", (x,), [x], [self.tensor(trt.int64, (len(x.shape),))])

    def add_slice(self, x, start, shape, stride):
        size = [-1 if want == 0 else want for want in shape]
        return self._layer("add_slice", "Slice", (x, start, shape, stride), [x], [self.tensor(x.dtype, size)])

    def add_dist_collective(self, x, operation, reduce_op, root, groups):
        outputs = [self.tensor(x.dtype, x.shape)]
        return self._layer(
            "add_dist_collective", "DistCollective", (x, operation, reduce_op, root, groups), [x], outputs
        )

    def add_plugin(self, make, aot):
        check_signature("add_plugin", (make,), {"aot": aot})
        assert aot
        tensors, shape_inputs, plugin = make(trt.QuickPluginCreationRequest.STRICT_AOT)
        assert not shape_inputs
        types = plugin.get_output_data_types([t.dtype for t in tensors], [len(t.shape) for t in tensors])
        b, n = tensors[0].shape[:2] if plugin.plugin_name.endswith("split") else tensors[2].shape[:2]
        attributes = dict(plugin.attrs)
        width = attributes["num_query_heads"] * attributes["head_dim"]
        shapes = [(-1, -1, -1, -1)] * 2 if plugin.plugin_name.endswith("split") else [(b, n, width)]
        layer = RecordedLayer(
            self, "PluginV3", tensors, [self.tensor(t, s) for t, s in zip(types, shapes, strict=True)]
        )
        layer.record.update({
            "plugin": f"{plugin.plugin_namespace}::{plugin.plugin_name}",
            "attributes": attributes,
            "input_types": [t.dtype.name for t in tensors],
            "input_shapes": [list(t.shape) for t in tensors],
            "output_types": [t.name for t in types],
        })  # fmt: skip
        return layer


class Builder:
    def __init__(self):
        self.flags = None

    def create_network(self, flags):
        self.flags = flags
        return RecordingNetwork()


SPEC = DecoderSpec(
    architecture="Qwen3ForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=80, num_layers=2, num_query_heads=4,
    num_kv_heads=2, head_dim=64, max_positions=256, has_qk_norm=True, has_qkv_bias=True, sliding_window=32, sliding_layers=(1,),
)  # fmt: skip
WIDTH = (4 + 2 * 2) * 64
SHAPES = {"embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64), "norm.weight": (64,)}
for i in range(2):
    SHAPES |= {
        f"layers.{i}.input_norm.weight": (64,), f"layers.{i}.post_norm.weight": (64,),
        f"layers.{i}.qkv.weight": (WIDTH, 64), f"layers.{i}.qkv.bias": (WIDTH,), f"layers.{i}.o.weight": (64, 256),
        f"layers.{i}.q_norm.weight": (64,), f"layers.{i}.k_norm.weight": (64,),
        f"layers.{i}.gate_up.weight": (160, 64), f"layers.{i}.down.weight": (64, 80),
    }  # fmt: skip

tensorrt = TensorRT(trt)
builder = Builder()
context = EmissionContext(
    tensorrt=tensorrt,
    dtype=torch.bfloat16,
    attention=PluginSettings(page_size=32, num_splits=4, plugins=registered_plugins(90)),
    rope=RopeTables(everywhere=RopeTable(torch.zeros(256, 32), torch.zeros(256, 32))),
)
weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
emitted = emit_target(builder, context, SPEC, weights, (1, 2))
network = emitted.network
ranks = replace(context, num_ranks=2)
parts = rank_weights(SPEC, weights, 0, 2)
try:
    divided = emit_target(Builder(), ranks, rank_spec(SPEC, 2), parts, (1, 2)).network.records
except BuildError as error:
    divided = str(error)
flags = trt.NetworkDefinitionCreationFlag
print(json.dumps({
    "version": trt.__version__, "records": network.records, "outputs": network.marked, "weights": network.named_weights,
    "is_strongly_typed": bool(builder.flags >> int(flags.STRONGLY_TYPED) & 1),
    "divided": divided, "tensors": {t.name: [t.dtype.name, list(t.shape)] for t in network.tensors},
}))  # fmt: skip
