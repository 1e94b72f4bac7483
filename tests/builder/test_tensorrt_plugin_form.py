"""A target emitted with our plugins, call by call, against the real bindings of TensorRT 10.14 and 11.4.

The calls are made by a subprocess (see tensorrt_recording.py), which holds each against the signature of the real method and
takes plugins through TensorRT's own registration.
"""

import json
from pathlib import Path

import pytest
from tensorrt_bindings import VERSIONS, run_with_bindings, stub_library

from furcate.plugins.specification import TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT

pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")

HALF = ["Shape", "Constant", "Gather", "Constant", "Concatenation", "Slice"]


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    return stub_library(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module", params=VERSIONS)
def recorded(request, stub):
    output = run_with_bindings(Path(__file__).with_name("tensorrt_recording.py"), request.param, stub)
    result = json.loads(output.splitlines()[-1])
    assert result["version"] == request.param
    return result


def layer_calls(recorded, layer: int) -> list[str]:
    """The calls of one decoder layer in order: kind, and the weight or plugin it is for."""
    names = [record.get("set", {}).get("name", "") for record in recorded["records"]]
    first = names.index(f"layers.{layer}.input_norm.weight")
    following = f"layers.{layer + 1}.input_norm.weight"
    last = names.index(following) if following in names else names.index("norm.weight")
    calls = zip(recorded["records"][first:last], names[first:last], strict=True)
    return [f"{record['kind']} {name}".strip().replace(f"layers.{layer}.", "") for record, name in calls]


def test_a_layer_is_emitted_call_by_call(recorded):
    norm = [
        "Shuffle",
        "Cast",
        "Cast",
        "ElementWise",
        "Reduce",
        "ElementWise",
        "Unary",
        "ElementWise",
        "ElementWise",
        "Cast",
    ]
    linear = ["Shuffle", "MatrixMultiply"]
    # The network's scalar constants are emitted once, so the second layer shows a layer's own calls alone.
    assert layer_calls(recorded, 1) == [
        "Constant input_norm.weight", *norm,
        "Constant qkv.weight", *linear, "Constant qkv.bias", "Shuffle", "ElementWise",
        "Constant q_norm.weight", "Cast", "Constant k_norm.weight", "Cast",
        "PluginV3 tree_attention_split", "PluginV3 tree_attention_reduce",
        "Constant o.weight", *linear, "ElementWise",
        "Constant post_norm.weight", *norm,
        "Constant gate_up.weight", *linear, *HALF, *HALF, "Activation", "ElementWise", "ElementWise",
        "Constant down.weight", *linear, "ElementWise",
    ]  # fmt: skip


def plugin_layers(recorded, specification):
    wanted = f"furcate::{specification.name}"
    return [record for record in recorded["records"] if record.get("plugin") == wanted]


def test_the_split_plugin_gets_every_input_of_its_specification_by_place(recorded):
    for layer, record in enumerate(plugin_layers(recorded, TREE_ATTENTION_SPLIT)):
        by_name = dict(zip([entry.name for entry in TREE_ATTENTION_SPLIT.inputs], record["inputs"], strict=True))
        same = {"positions": "positions", "tree_mask": "tree_mask", "num_valid": "num_nodes",
                "cache_lengths": "cache_lengths", "page_table": "page_table", "kv_pool": "kv_pool"}  # fmt: skip
        assert {name: by_name[name] for name in same} == same
        types = {"T": "BF16", "int32": "INT32", "int64": "INT64", "float32": "FLOAT"}
        assert record["input_types"] == [types[entry.dtype] for entry in TREE_ATTENTION_SPLIT.inputs]
        ranks = [len(entry.shape) for entry in TREE_ATTENTION_SPLIT.inputs]
        assert [len(shape) for shape in record["input_shapes"]] == ranks
        assert record["input_shapes"][0] == [-1, -1, 512]
        assert record["output_types"] == ["FLOAT", "FLOAT"]
        assert record["attributes"] == {
            "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 32, "has_fp8_pages": 0, "layer": layer,
            "num_splits": 4, "scale": 0.125, "softcap": 0.0, "sliding_window": 32 * layer, "norm_eps": 1e-5,
            "has_norms": 1, "is_chain": 0,
        }  # fmt: skip


def test_the_reduce_plugin_reads_what_the_split_plugin_made(recorded):
    splits, reduces = (plugin_layers(recorded, entry) for entry in (TREE_ATTENTION_SPLIT, TREE_ATTENTION_REDUCE))
    assert len(splits) == len(reduces) == 2
    for split, reduce in zip(splits, reduces, strict=True):
        assert reduce["inputs"][2] == split["inputs"][0], "both are told the same fused projection"
        assert len({*reduce["inputs"]}) == 3
        assert reduce["output_types"] == ["BF16"]


def test_inputs_and_outputs_are_the_engines(recorded):
    inputs = {
        record["name"]: (record["dtype"], record["shape"])
        for record in recorded["records"]
        if record["kind"] == "input"
    }
    assert inputs == {
        "token_ids": ("INT32", [-1, -1]), "positions": ("INT32", [-1, -1]), "tree_mask": ("INT32", [-1, -1, -1]),
        "cache_lengths": ("INT32", [-1]), "page_table": ("INT32", [-1, -1]), "num_nodes": ("INT32", [-1]),
        "logit_rows": ("INT32", [-1, -1]), "kv_pool": ("INT64", [2]),
    }  # fmt: skip
    outputs = {output["name"]: (output["dtype"], output["shape"]) for output in recorded["outputs"]}
    assert outputs == {"logits": ("FLOAT", [-1, -1, 96]), "features": ("BF16", [-1, -1, 128])}


def test_every_weight_can_be_refitted_by_its_name_and_the_network_is_strongly_typed(recorded):
    assert recorded["is_strongly_typed"]
    assert len(recorded["weights"]) == len(set(recorded["weights"])) == 3 + 2 * 9
    assert {"embed_tokens.weight", "norm.weight", "lm_head.weight", "layers.1.down.weight"} <= set(recorded["weights"])


def test_two_ranks_sum_after_attention_and_mlp_where_the_version_has_collectives(recorded):
    divided = recorded["divided"]
    if recorded["version"].startswith("10.14"):
        assert divided == (
            "--tp-size 2 needs TensorRT's collective layers, which came with 10.16; this is TensorRT 10.14.1.48.post1."
        )
        return
    sums = [record for record in divided if record["kind"] == "DistCollective"]
    names = [f"layers.{layer}.{module}.all_reduce" for layer in range(2) for module in ("o", "down")]
    assert [record["set"]["name"] for record in sums] == names
    assert {record["set"]["num_ranks"] for record in sums} == {"2"}
    heads = {(r["attributes"]["num_query_heads"], r["attributes"]["num_kv_heads"]) for r in divided if "plugin" in r}
    assert heads == {(2, 1)}
