"""The C++ plugins: their tables from the specification, and the built library asked as TensorRT asks, over stubs.

TensorRT's public headers are those of FURCATE_TENSORRT_INCLUDE, of an installed TensorRT, or of a public wheel.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tensorrt_bindings import tensorrt_headers

from furcate.builder.errors import BuildError, ConfigError
from furcate.plugins.specification import CACHE_COMMIT, SPECIFICATIONS, TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT

pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("TRITON_INTERPRET is set: kernels cannot be compiled in this process", allow_module_level=True)

from furcate.plugins.native import build
from furcate.plugins.tree_attention.tactics import choose_tactic

HERE = Path(__file__).parent
# DataType of NvInfer by the specification's names; activations are bf16 here.
CODES = {"T": 7, "float32": 0, "int32": 3, "int64": 8}
ATTRIBUTES = {"num_query_heads": 16, "num_kv_heads": 4, "head_dim": 64, "page_size": 32, "has_fp8_pages": 0, "layer": 3,
              "num_splits": 6, "scale": 0.125, "softcap": 0, "sliding_window": 0, "norm_eps": 1e-6, "has_norms": 0,
              "is_chain": 0, "max_entries": 8, "element_bytes": 2}  # fmt: skip


def config(folder: Path, include: Path) -> build.NativeConfig:
    return build.NativeConfig(
        num_query_heads=16, num_kv_heads=4, head_dim=64, page_size=32, num_splits=6, max_entries=8, archs=(90,),
        output=folder, tensorrt_include=include,
    )  # fmt: skip


def test_tables_and_cubins_assemble(tmp_path):
    """What is generated compiles by itself, and every kernel's cubin is embedded unchanged."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    settings = config(tmp_path, tmp_path)
    build.write_tables(settings, tmp_path)
    rows = list(build.compiled_rows(settings))
    for name in ("tables.cpp", "cubins.S"):
        command = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{build.SOURCES}", "-c", name, "-o", f"{name}.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
    embedded = (tmp_path / "cubins.S.o").read_bytes()
    assert len(rows) == 6
    assert all(row.kernel.cubin in embedded for row in rows)


def test_tables_name_the_specification(tmp_path):
    text = build.tables_source(config(tmp_path, tmp_path), [])
    for number, specification in enumerate(SPECIFICATIONS):
        inputs = re.search(rf"kINPUTS_{number}\[\] = \{{(.*)\}};", text)[1]
        assert re.findall(r'"(\w+)"', inputs) == [entry.name for entry in specification.inputs]
        settings = re.search(rf"kSETTINGS_{number}\[\] = \{{(.*)\}};", text)[1]
        assert re.findall(r'"(\w+)"', settings) == [entry.name for entry in specification.attributes]
        counts = f"{len(specification.attributes)}, {len(specification.scalars)}}}"
        assert f"kSETTINGS_{number}, {counts}" in text


def test_positions_in_the_sources_are_those_of_the_specification():
    """geometry.cpp reads sizes from inputs by position."""
    source = (build.SOURCES / "geometry.cpp").read_text()
    known = {"SPLIT": TREE_ATTENTION_SPLIT, "REDUCE": TREE_ATTENTION_REDUCE, "COMMIT": CACHE_COMMIT}
    inputs = {"POOL": "kv_pool"}
    found = re.findall(r"constexpr std::int32_t k(SPLIT|REDUCE|COMMIT)_(\w+) = (\d+);", source)
    assert len(found) == 8
    for kind, name, position in found:
        assert known[kind].inputs[int(position)].name == inputs.get(name, name.lower())


def test_missing_headers_and_types_are_named(tmp_path):
    with pytest.raises(BuildError, match=r"holds no NvInferRuntime\.h; name TensorRT's include folder"):
        build.build_library(config(tmp_path, tmp_path))
    with pytest.raises(ConfigError, match="activation is fp32"):
        build.build_library(build.NativeConfig(**{**vars(config(tmp_path, tmp_path)), "activation": "fp32"}))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """What each plugin of a freshly built library answers, by name; 4 sequences, 10 nodes, 40 rows."""
    for missing in [name for name in ("cmake", "g++", "gcc") if shutil.which(name) is None]:
        pytest.skip(f"needs {missing}")
    include = tensorrt_headers()
    folder = tmp_path_factory.mktemp("native")
    library = build.build_library(config(folder, include))
    harness = folder / "harness"
    subprocess.run(
        ["g++", "-std=c++17", "-isystem", str(include), "-isystem", str(build.CUDA_HEADERS),
         "-o", str(harness), str(HERE / "native_harness.cpp"), "-ldl"], check=True,
    )  # fmt: skip
    driver = folder / "driver"
    driver.mkdir()
    stub = ["gcc", "-shared", "-fPIC", "-o", str(driver / "libcuda.so.1"), str(HERE / "libcuda_stub.c")]
    subprocess.run(stub, check=True)
    sizes = ["4", "10", "1", "128", "5", "3"]
    given = [f"{name}={value}" for name, value in ATTRIBUTES.items()]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    result = subprocess.run(
        [str(harness), str(library), *sizes, *given], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return {answer["name"]: answer for answer in found}


@pytest.mark.parametrize("specification", SPECIFICATIONS, ids=lambda s: s.name)
def test_library_is_the_specification(answers, specification):
    answer = answers[specification.name]
    assert answer["namespace"] == "furcate"
    assert answer["attributes"] == {entry.name: entry.kind.__name__ for entry in specification.attributes}
    assert answer["types"] == [CODES[entry.dtype] for entry in (*specification.inputs, *specification.outputs)]
    assert answer["declared"] == [CODES[entry.dtype] for entry in specification.outputs]
    assert [len(shape) for shape in answer["shapes"]] == [len(entry.shape) for entry in specification.outputs]
    assert len(answer["scalars"]) == len(specification.scalars)
    assert answer["kernel"] == specification.name
    assert answer["pointers_in_order"]
    assert answer["code"] == 0


def test_split_of_the_library_is_launched_like_the_other_route(answers):
    answer, tactic = answers["tree_attention_split"], choose_tactic(90, 40, 64, 2)
    assert answer["shapes"] == [[16, 6, 40, 64], [16, 6, 40, 2]]
    assert answer["grid"] == [-(-40 // tactic.block_m), 6, 16]
    assert answer["scalars"] == [3, 10, 1, 128, 6, 0]
    assert answer["threads"] == 32 * tactic.num_warps
    assert answer["limit"] == answer["shared_bytes"] > 49_152  # more than TensorRT's own route may use


def test_reduce_and_commit_of_the_library_are_launched_like_the_other_route(answers):
    reduce, commit = answers["tree_attention_reduce"], answers["cache_commit"]
    assert (reduce["grid"], reduce["scalars"], reduce["shapes"]) == ([40, 16, 1], [10, 6], [[4, 10, 1024]])
    assert (commit["grid"], commit["scalars"], commit["shapes"]) == ([1, 6, 4], [128, 5], [[4]])
