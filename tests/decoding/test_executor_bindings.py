"""What the TensorRT executor calls exists in the real bindings of TensorRT 10.14 and 11.4, which are loaded over a stub library."""

import ast
import json
from pathlib import Path

import pytest
from tensorrt_bindings import VERSIONS, run_with_bindings, stub_library

from furcate.decoding.executors import tensorrt, tensorrt_plan
from furcate.decoding.executors.ranks import capsule_of

CLASSES = {
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "refitter": "Refitter",
    "runtime": "Runtime",
    "trt": "",
}
"""What the variables of these names hold in the executor's files."""
OF_OURS = {"path", "manifest", "weights", "tokenizer_dir"}
"""Attributes of the engine directory, which is called `engine` too."""
SINCE_10_16 = {"set_communicator"}
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tensorrt_bindings as trt
names = {kind: dir(getattr(trt, kind)) for kind in ("IExecutionContext", "ICudaEngine", "Refitter", "Runtime")}
communicator = getattr(trt.IExecutionContext, "set_communicator", None)
print(json.dumps({**names, "": dir(trt), "communicator": communicator and communicator.__doc__}))
"""


def names_used() -> set[tuple[str, str]]:
    """(class, attribute) of everything that is asked of TensorRT's objects."""
    used = set()
    for module in (tensorrt, tensorrt_plan):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
            if owner in CLASSES and node.attr not in OF_OURS:
                used.add((CLASSES[owner], node.attr))
    return used


@pytest.fixture(scope="module", params=VERSIONS)
def bindings(request, tmp_path_factory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("stub")
    script = folder / "names.py"
    script.write_text(SCRIPT)
    return request.param, json.loads(run_with_bindings(script, request.param, stub_library(folder)))


def test_every_name_exists(bindings):
    version, names = bindings
    used = names_used()
    assert {
        ("IExecutionContext", "execute_async_v3"),
        ("ICudaEngine", "get_tensor_profile_shape"),
        ("", "Refitter"),
    } <= used
    missing = {(kind, name) for kind, name in used if name not in names[kind]}
    allowed = {("IExecutionContext", name) for name in SINCE_10_16}
    assert missing == (allowed if version.startswith("10.") else set())


def test_a_communicator_is_given_as_a_capsule_and_every_rank_must_give_it(bindings):
    version, names = bindings
    if version.startswith("10."):
        assert names["communicator"] is None
        return
    assert "communicator: typing_extensions.CapsuleType) -> bool" in names["communicator"]
    assert "This is a collective call" in names["communicator"]
    assert type(capsule_of(4096)).__name__ == "PyCapsule"
