"""The plugins' interface, once: both TensorRT routes, the ahead-of-time signatures and the README come from here.

A kernel's arguments are inputs, int32 scalars, outputs, in this order, each tensor named `<name>_ptr`: TensorRT
launches them so. B batch, N nodes, W mask words, P pages, L layers, M = N * Hq / Hkv rows, S splits, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a plugin. dtype "T" is the activations' type: float16, bfloat16 or float32."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class AttributeEntry:
    """A build-time setting of a plugin; `kind` is int or float. Where 0 means off, the meaning says so."""

    name: str
    kind: type
    meaning: str


@dataclass(frozen=True, kw_only=True)
class PluginSpecification:
    """A plugin: its kernel's arguments in order, and its attributes."""

    name: str
    inputs: tuple[TensorEntry, ...]
    scalars: tuple[str, ...]
    outputs: tuple[TensorEntry, ...]
    attributes: tuple[AttributeEntry, ...]

    @property
    def kernel_arguments(self) -> tuple[str, ...]:
        """Names of the kernel's run-time arguments, in launch order."""
        tensors = [[f"{entry.name}_ptr" for entry in entries] for entries in (self.inputs, self.outputs)]
        return (*tensors[0], *self.scalars, *tensors[1])

    def signature(self, activation: str) -> dict[str, str]:
        """Triton type of every run-time argument; `activation` ("fp16", "bf16", "fp32") stands for T."""
        types = {"T": activation, "int32": "i32", "int64": "i64", "float32": "fp32"}
        tensors = {f"{entry.name}_ptr": f"*{types[entry.dtype]}" for entry in (*self.inputs, *self.outputs)}
        return {name: tensors.get(name, "i32") for name in self.kernel_arguments}


SIZES = (
    AttributeEntry("num_query_heads", int, "query heads"),
    AttributeEntry("num_kv_heads", int, "KV heads"),
    AttributeEntry("head_dim", int, "64, 80, 96, 128 or 256"),
)
PAGE = AttributeEntry("page_size", int, "tokens of a page: 16, 32, 64 or 128")
KV_TYPE = AttributeEntry("has_fp8_pages", int, "1: pages in float8 e4m3; 0: pages in T")
SPLITS = AttributeEntry("num_splits", int, "splits of the prefix")
POOL = TensorEntry("kv_pool", "int64", ("L",), "device address of every layer's pages [pages, 2, page_size, Hkv, D]")
CACHE_LENGTHS = TensorEntry("cache_lengths", "int32", ("B",), "committed tokens")
PAGE_TABLE = TensorEntry("page_table", "int32", ("B", "P"), "the sequence's pages")
QKV = TensorEntry("qkv", "T", ("B", "N", "(Hq + 2 Hkv) D"), "fused projection, not rotated")
PARTIALS = (
    TensorEntry("partial_out", "float32", ("B Hkv", "S", "M", "D"), "weighted values of every split, not divided"),
    TensorEntry("partial_stats", "float32", ("B Hkv", "S", "M", "2"), "greatest score (base 2) and sum of weights"),
)

TREE_ATTENTION_SPLIT = PluginSpecification(
    name="tree_attention_split",
    inputs=(
        QKV,
        TensorEntry("positions", "int32", ("B", "N"), "cache length + depth"),
        TensorEntry("tree_mask", "int32", ("B", "N", "W"), "ancestor words, LSB first; not read with is_chain"),
        TensorEntry("num_valid", "int32", ("B",), "nodes that are not padding"),
        CACHE_LENGTHS,
        PAGE_TABLE,
        TensorEntry("rope_cos", "float32", ("positions", "D / 2"), "cosine by position, half-split"),
        TensorEntry("rope_sin", "float32", ("positions", "D / 2"), "sine by position"),
        TensorEntry("query_norm", "float32", ("D",), "RMS norm weight of q's heads; not read without has_norms"),
        TensorEntry("key_norm", "float32", ("D",), "the same for k"),
        TensorEntry("kv_scales", "float32", ("2",), "key and value scale of fp8 pages; not read otherwise"),
        POOL,
    ),
    scalars=("layer", "num_nodes", "num_words", "num_pages", "num_splits", "node_offset"),
    outputs=PARTIALS,
    attributes=(
        *SIZES,
        PAGE,
        KV_TYPE,
        AttributeEntry("layer", int, "row of kv_pool"),
        SPLITS,
        AttributeEntry("scale", float, "factor on q.k"),
        AttributeEntry("softcap", float, "soft cap of the scores; 0: none"),
        AttributeEntry("sliding_window", int, "tokens a node looks back; 0: all"),
        AttributeEntry("norm_eps", float, "epsilon of the head norms"),
        AttributeEntry("has_norms", int, "1: q and k are RMS-normed by head"),
        AttributeEntry("is_chain", int, "1: nodes follow each other; the mask is not read"),
    ),
)

TREE_ATTENTION_REDUCE = PluginSpecification(
    name="tree_attention_reduce",
    inputs=(*PARTIALS, TensorEntry("qkv", "T", ("B", "N", "(Hq + 2 Hkv) D"), "names B, N and T; not read")),
    scalars=("num_nodes", "num_splits"),
    outputs=(TensorEntry("out", "T", ("B", "N", "Hq D"), "attention of every node; zero for padding"),),
    attributes=(*SIZES, SPLITS),
)

CACHE_COMMIT = PluginSpecification(
    name="cache_commit",
    inputs=(
        PAGE_TABLE,
        CACHE_LENGTHS,
        TensorEntry("path_nodes", "int32", ("B", "A"), "accepted nodes, root first, ascending"),
        TensorEntry("num_accepted", "int32", ("B",), "entries of path_nodes that count"),
        POOL,
    ),
    scalars=("num_pages", "num_entries"),
    outputs=(TensorEntry("committed_lengths", "int32", ("B",), "cache_lengths + num_accepted"),),
    attributes=(
        *SIZES[1:],
        PAGE,
        AttributeEntry("max_entries", int, "greatest A"),
        AttributeEntry("element_bytes", int, "bytes of one K or V element: 1, 2 or 4"),
    ),
)

SPECIFICATIONS = (TREE_ATTENTION_SPLIT, TREE_ATTENTION_REDUCE, CACHE_COMMIT)
