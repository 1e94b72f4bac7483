"""Where tritonserver is found, and the sentences when it is not or will not start."""

import sys
from pathlib import Path

import pytest

from furcate.builder.errors import ConfigError
from furcate.client import installation
from furcate.client.server_log import failure_in_log


def test_wheel_is_found_with_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "CONTAINER_ROOT", tmp_path / "none")
    found = installation.find_installation(tmp_path)
    assert found.binary.is_file()
    names = {path.name for path in (found.backend_directory / "python").iterdir() if path.exists()}
    assert names == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert (found.cache_directory / "local").is_dir()
    assert found.environment["PATH"].startswith(f"{sys.prefix}/bin:")


def test_container_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "tritonserver"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tritonserver").touch()
    monkeypatch.setattr(installation, "CONTAINER_ROOT", root)
    found = installation.find_installation(tmp_path)
    assert (found.binary, found.backend_directory) == (root / "bin/tritonserver", root / "backends")


def test_no_server_at_all_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "CONTAINER_ROOT", tmp_path / "none")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"No tritonserver here: .*pip install 'furcate\[server\]'"):
        installation.find_installation(tmp_path)


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (
            "E1129 x.cc:1] \"failed to load 'tensorrt_llm' version 1: Internal: EngineMismatch: file f has changed; build it"
            ' again.\\n\\nAt:\\n  /x/triton_fused.py(3): initialize\\n"',
            "file f has changed; build it again. Its log is ",
        ),
        ("E x] \"failed to load 'a' version 1: Internal: ImportError: no b\"", 'Error: no b". Its log is '),
        (
            "error: creating server: Internal - failed to load all models\n",
            "creating server: Internal - failed to load",
        ),
        ("nothing of use", "no reason was logged. Its log is "),
    ],
)
def test_log_gives_the_reason_in_one_sentence(log: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "triton.log"
    file.write_text(log)
    reason = failure_in_log(file)
    assert sentence in reason
    assert "\n" not in reason
    assert reason.endswith(f"{file}.")
