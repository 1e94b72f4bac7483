"""The TensorRT plugins, asked by TensorRT's own plugin class over a stub of its library, against their specification."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import tensorrt_bindings

from furcate.builder.errors import BuildError, ConfigError
from furcate.plugins.specification import CACHE_COMMIT, SPECIFICATIONS, TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT
from furcate.plugins.tree_attention.tactics import PLUGIN_SHARED_BYTES, PLUGIN_TACTICS

pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels cannot be compiled in this process", allow_module_level=True)

from furcate.plugins.aot import CompiledKernel, KernelReport
from furcate.plugins.tensorrt_plugin import launchable_ptx, register_plugins

# The oldest bindings that have ahead-of-time plugins, besides those that engines are built with.
VERSIONS = ("10.13.3.9", *tensorrt_bindings.VERSIONS)


@pytest.fixture(scope="session")
def stub(tmp_path_factory) -> Path:
    """Folder with the stub under the names that the bindings load."""
    return tensorrt_bindings.stub_library(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session", params=VERSIONS)
def dry_run(request, stub) -> dict:
    script = Path(__file__).with_name("tensorrt_dry_run.py")
    answers = json.loads(tensorrt_bindings.run_with_bindings(script, request.param, stub).splitlines()[-1])
    assert answers["version"] == request.param
    return answers


def launches(dry_run):
    """(specification, sizes, answer, launch) of everything that was asked."""
    for specification in SPECIFICATIONS:
        for sizes, answer in zip(dry_run["sizes"], dry_run["answers"][specification.name], strict=True):
            for launch in answer["launches"]:
                yield specification, sizes, answer, launch


def test_kernel_parameters_are_inputs_scalars_outputs(dry_run):
    for specification, _, _, launch in launches(dry_run):
        entry = re.search(r"\.visible \.entry (\w+)\((.*?)\n\)", launch["ptx"], re.DOTALL)
        assert entry[1] == launch["name"] == specification.name
        kinds = re.findall(r"\.param \.(u64|u32)", entry[2])
        inputs, outputs = len(specification.inputs), len(specification.outputs)
        assert kinds == ["u64"] * inputs + ["u32"] * len(specification.scalars) + ["u64"] * outputs
        assert launch["num_scalars"] == len(specification.scalars)


def test_ptx_is_of_the_pinned_version_and_free_of_memory_of_its_own(dry_run):
    for _, _, _, launch in launches(dry_run):
        assert ".version 8.0\n.target sm_90a" in launch["ptx"]
        assert launch["shared_mem"] <= PLUGIN_SHARED_BYTES
        assert not re.search(r"\.local \.align", launch["ptx"])
        block = int(re.search(r"\.reqntid (\d+)", launch["ptx"])[1])
        assert (launch["block_x"], launch["block_y"], launch["block_z"]) == (block, 1, 1)


def test_split_covers_all_rows_splits_and_heads(dry_run):
    for specification, sizes, answer, launch in launches(dry_run):
        if specification is not TREE_ATTENTION_SPLIT:
            continue
        b, n, p = sizes["B"], sizes["N"], sizes["P"]
        block_m = PLUGIN_TACTICS[launch["tactic"] - 1].tactic.block_m
        assert (launch["grid_x"], launch["grid_y"], launch["grid_z"]) == (-(-4 * n // block_m), 6, 8 * b)
        assert launch["scalars"] == [3, n, -(-n // 32), p, 6, 0]
        assert answer["output_shapes"] == [[8 * b, 6, 4 * n, 128], [8 * b, 6, 4 * n, 2]]
        assert answer["output_types"] == ["FLOAT", "FLOAT"]


def test_reduce_covers_all_rows(dry_run):
    for specification, sizes, answer, launch in launches(dry_run):
        if specification is TREE_ATTENTION_REDUCE:
            b, n = sizes["B"], sizes["N"]
            assert (launch["grid_x"], launch["grid_y"], launch["grid_z"]) == (4 * n, 8 * b, 1)
            assert launch["scalars"] == [n, 6]
            assert answer["output_shapes"] == [[b, n, 4096]]
            assert answer["output_types"] == ["BF16"]


def test_commit_covers_all_layers(dry_run):
    for specification, sizes, answer, launch in launches(dry_run):
        if specification is CACHE_COMMIT:
            assert (launch["grid_x"], launch["grid_y"], launch["grid_z"]) == (2, 2 * 4, sizes["B"])
            assert launch["scalars"] == [sizes["P"], sizes["A"]]
            assert answer["output_shapes"] == [[sizes["B"]]]


def test_float16_and_bfloat16_are_offered_for_every_plugin_with_activations(dry_run):
    for specification, _, answer, _ in launches(dry_run):
        has_activations = any(entry.dtype == "T" for entry in (*specification.inputs, *specification.outputs))
        assert answer["formats"] == (2 if has_activations else 1)


def kernel_with(ptx: str) -> CompiledKernel:
    """A compiled kernel of that PTX."""
    report = KernelReport(
        arch=90, registers=32, stack_bytes=0, shared_bytes=0, tensor_memory_columns=0, num_warps=4, opcodes=None
    )
    return CompiledKernel(name="k", ptx=ptx, cubin=b"", report=report)


PTX = """.visible .entry k(
	.param .u64 k_param_0,
	.param .u64 k_param_1,
	.param .u64 k_param_2
)
{
	ld.param.b64 	%rd1, [k_param_READ];
}
"""


def test_hidden_parameters_are_dropped():
    kept = launchable_ptx(kernel_with(PTX.replace("READ", "0")))
    assert re.findall(r"\.param \.u64 (\w+)", kept) == ["k_param_0"]
    assert kept.endswith("[k_param_0];\n}\n")


def test_a_kernel_that_reads_a_hidden_parameter_is_refused():
    with pytest.raises(BuildError, match="k reads its hidden parameter k_param_2, which TensorRT does not pass"):
        launchable_ptx(kernel_with(PTX.replace("READ", "2")))


def test_missing_tensorrt_is_one_sentence():
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed here")
    with pytest.raises(BuildError, match=r"tensorrt\.plugin cannot be imported .*pip install tensorrt"):
        register_plugins(90)


def test_unknown_architecture_is_named():
    with pytest.raises(ConfigError, match="sm_70 is not known"):
        register_plugins(70)
