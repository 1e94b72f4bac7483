"""What SECURITY.md says of the sources: no code out of a checkpoint, a request or a file is ever run."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("builder", "client", "decoding", "model_repository", "plugins")
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "marshal.loads",
    "os.system",
}


@cache
def calls() -> tuple[tuple[str, str, ast.Call], ...]:
    """(file, name, call) of every call in the product: "torch.load", or ".from_pretrained" where its object is an expression."""
    return tuple(
        (str(path.relative_to(ROOT)), ast.unparse(node.func), node)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    )


def given(call: ast.Call, keyword: str) -> object:
    """The constant that a keyword of a call is given; None when it is not there."""
    return next((ast.literal_eval(each.value) for each in call.keywords if each.arg == keyword), None)


def test_nothing_read_is_run() -> None:
    found = [(file, name) for file, name, _ in calls() if name in FORBIDDEN]
    assert found == []


def test_commands_never_go_through_a_shell() -> None:
    through = [(file, name) for file, name, call in calls() if name.startswith("subprocess.") and given(call, "shell")]
    assert through == []
    assert not [file for file, name, _ in calls() if name in ("os.popen", "subprocess.getoutput")]


def test_torch_loads_tensors_only() -> None:
    loads = [(file, given(call, "weights_only")) for file, name, call in calls() if name == "torch.load"]
    assert loads == [("builder/checkpoints/stored.py", True)]


def test_no_checkpoint_brings_code_of_its_own() -> None:
    loads = [
        (file, call) for file, name, call in calls() if name.startswith("Auto") and name.endswith(".from_pretrained")
    ]
    assert len(loads) > 5
    assert [file for file, call in loads if given(call, "trust_remote_code") is not False] == []


def test_numpy_reads_no_objects() -> None:
    assert not [
        file for file, name, call in calls() if name in ("np.load", "numpy.load") and given(call, "allow_pickle")
    ]
