"""The TensorRT plugin furcate::cache_commit. B batch, A path entries, P pages, L layers."""

from __future__ import annotations

from furcate.plugins.cache_commit.aot import commit_source
from furcate.plugins.specification import CACHE_COMMIT
from furcate.plugins.tensorrt_plugin import Call, PluginDefinition, PluginLaunch


def _shapes(call: Call) -> list[tuple]:
    return [(call.dimension("cache_lengths", 0),)]


def _launch(call: Call, _tactic: int) -> PluginLaunch:
    attributes = call.attributes
    row_width = attributes["num_kv_heads"] * attributes["head_dim"]
    source = commit_source(row_width, attributes["page_size"], attributes["max_entries"], attributes["element_bytes"])
    slices = -(-row_width // source.constants["BLOCK_C"])
    num_rows, num_entries = call.dimension("path_nodes", 0), call.dimension("path_nodes", 1)
    return PluginLaunch(
        source=source,
        grid=(slices, call.dimension("kv_pool", 0) * 2, num_rows),
        scalars=(call.dimension("page_table", 1), num_entries),
    )


COMMIT = PluginDefinition(
    specification=CACHE_COMMIT,
    output_shapes=_shapes,
    tactics=lambda _call: [1],
    launch=_launch,
)
