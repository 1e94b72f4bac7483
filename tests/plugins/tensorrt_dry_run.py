"""TensorRT's own plugin class asks our plugins all that a build asks, over a stub of its library; prints JSON.

Usage: tensorrt_dry_run.py <folder of the unpacked bindings>, with LD_LIBRARY_PATH naming the stub's folder.
Only what the library itself would provide is replaced: dimension expressions, which here are numbers.
"""

# ruff: noqa: E402

import json
import sys
from types import SimpleNamespace

sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as trt

sys.modules["tensorrt"] = trt


class Dimension:
    """A dimension expression that is a number."""

    def __init__(self, value):
        self.value = value

    def is_constant(self):
        return True

    def get_constant_value(self):
        return self.value


OPERATIONS = {
    "SUM": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "PROD": lambda a, b: a * b,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
    "MAX": max,
    "MIN": min,
    "EQUAL": lambda a, b: int(a == b),
    "LESS": lambda a, b: int(a < b),
}


class ExpressionBuilder:
    """IExprBuilder on numbers."""

    def constant(self, value):
        return Dimension(value)

    def operation(self, kind, a, b):
        return Dimension(OPERATIONS[kind.name](a.value, b.value))


class Scalars(dict):
    """ISymExprs: a list whose length, nbSymExprs, is set by get_launch_params."""


trt.IDimensionExpr = Dimension
trt.ISymExpr = object
import tensorrt_bindings.plugin as trtp

trt.DimsExprs = lambda length: [None] * length
sys.modules["tensorrt.plugin"] = trtp
from tensorrt_bindings.plugin import _lib, _plugin_class, _tensor

_tensor.SymExprImpl.__init__ = lambda self, expr: setattr(self, "expr", expr._expr)

from furcate.plugins.specification import SPECIFICATIONS
from furcate.plugins.tensorrt_plugin import register_plugins

TYPES = {"T": trt.DataType.BF16, "float32": trt.float32, "int32": trt.int32, "int64": trt.int64}
HEADS, KV_HEADS, HEAD_DIM, PAGE, LAYERS, SPLITS = 32, 8, 128, 64, 4, 6
ATTRIBUTES = {
    "num_query_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE, "has_fp8_pages": 0,
    "layer": 3, "num_splits": SPLITS, "scale": HEAD_DIM**-0.5, "softcap": 0.0, "sliding_window": 0, "norm_eps": 1e-6,
    "has_norms": 0, "is_chain": 0, "max_entries": 8, "element_bytes": 2,
}  # fmt: skip


def shapes_of(specification, sizes):
    """Sizes of every input for one shape of the engine."""
    b, n, p, a = sizes["B"], sizes["N"], sizes["P"], sizes["A"]
    rows = (b * KV_HEADS, SPLITS, n * HEADS // KV_HEADS)
    known = {
        "qkv": (b, n, (HEADS + 2 * KV_HEADS) * HEAD_DIM), "positions": (b, n), "tree_mask": (b, n, -(-n // 32)),
        "num_valid": (b,), "cache_lengths": (b,), "page_table": (b, p), "rope_cos": (8192, HEAD_DIM // 2),
        "rope_sin": (8192, HEAD_DIM // 2), "query_norm": (HEAD_DIM,), "key_norm": (HEAD_DIM,), "kv_scales": (2,),
        "kv_pool": (LAYERS,), "partial_out": (*rows, HEAD_DIM), "partial_stats": (*rows, 2),
        "path_nodes": (b, a), "num_accepted": (b,),
    }  # fmt: skip
    return [known[entry.name] for entry in specification.inputs]


def described(shape, kind):
    """What TensorRT hands over for a tensor while it asks for formats and launches."""
    dynamic = trt.DynamicPluginTensorDesc()
    dynamic.desc.dims, dynamic.desc.type, dynamic.desc.format = trt.Dims(shape), kind, trt.TensorFormat.LINEAR
    return dynamic


def ask(specification, sizes):
    """All that a build asks of a plugin for one shape."""
    definition = _lib.QDP_REGISTRY[f"furcate::{specification.name}"]
    attributes = {entry.name: ATTRIBUTES[entry.name] for entry in specification.attributes}
    plugin = _plugin_class._TemplateAOTPlugin(specification.name, "furcate", definition.num_outputs)
    plugin.init(
        definition.register_func, attributes, definition.aot_impl_attr_names, definition.aot_impl_func,
        definition.autotune_attr_names, definition.autotune_func,
    )  # fmt: skip
    shapes = shapes_of(specification, sizes)
    types = [TYPES[entry.dtype] for entry in specification.inputs]
    output_types = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    inputs = [[Dimension(size) for size in shape] for shape in shapes]
    outputs = plugin.get_output_shapes(inputs, [], ExpressionBuilder())
    output_shapes = [[int(size.value) for size in shape] for shape in outputs]
    everything = [described(s, t) for s, t in zip(shapes + output_shapes, types + output_types, strict=True)]
    formats = plugin.get_supported_format_combinations(everything, len(inputs))
    plugin.configure_plugin(everything[: len(inputs)], everything[len(inputs) :])
    launches = []
    for tactic in sorted(plugin.get_valid_tactics()):
        plugin.set_tactic(tactic)
        parameters, scalars = SimpleNamespace(), Scalars()
        plugin.get_launch_params(inputs, everything, len(inputs), parameters, scalars, ExpressionBuilder())
        name, ptx = plugin.get_kernel(
            [d.desc for d in everything[: len(inputs)]], [d.desc for d in everything[len(inputs) :]]
        )
        launches.append({
            "tactic": tactic, "name": name, "ptx": ptx.decode(), "num_scalars": scalars.nbSymExprs,
            "scalars": [scalars[i].expr.value for i in range(scalars.nbSymExprs)],
            **{key: value.expr.value for key, value in vars(parameters).items()},
        })  # fmt: skip
    return {
        "output_types": [kind.name for kind in output_types], "output_shapes": output_shapes,
        "formats": len(formats) // len(everything), "launches": launches,
    }  # fmt: skip


register_plugins(90)
register_plugins(90)
SIZES = [{"B": 1, "N": 1, "P": 2, "A": 1}, {"B": 4, "N": 16, "P": 128, "A": 8}, {"B": 3, "N": 65, "P": 7, "A": 5}]
answers = {s.name: [ask(s, sizes) for sizes in SIZES] for s in SPECIFICATIONS}
print(json.dumps({"version": trt.__version__, "sizes": SIZES, "answers": answers}))
