"""`furcate serve` and `furcate generate` as a user runs them, each in its own process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served_command import AUTO, FURCATE, Served

from furcate.client.shared_memory import SHARED_MEMORY
from furcate.model_repository.generate import write_repository


def furcate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FURCATE, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def repository(tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("serve") / "repository", engine_dir=tiny_engine("eagle3"))


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.server
def test_serve_is_ready_after_its_canary_and_ends_clean_on_sigterm(repository: Path, tmp_path: Path) -> None:
    served = Served(repository, *AUTO, "--log-file", str(tmp_path / "triton.log"))
    try:
        assert re.search(r"Ready: a first generation gave [1-8] tokens in [\d.]+ s\.", served.output), served.output
        done = furcate(
            "generate", "Hello", "--url", served.address("gRPC"), "--max-tokens", "9", "--temperature", "0.5"
        )
        assert done.returncode == 0
        assert re.fullmatch(
            r"\d tokens in [\d.]+ s, [\d.]+ tokens/s, tau [\d.]+, finish reason: (length|end_id)\n", done.stderr
        )
        with urllib.request.urlopen(served.address("metrics")) as answer:
            assert "furcate_pages{" in answer.read().decode()
        before = set(SHARED_MEMORY.glob("furcate*"))
        assert before
    finally:
        code = served.end(signal.SIGTERM)
    assert code == 0, served.output
    assert served.output.endswith("Ended: SIGTERM.\n")
    server_id = re.search(r"server_id +\| (\S+)", (tmp_path / "triton.log").read_text()).group(1)
    assert not list(SHARED_MEMORY.glob(f"{server_id.replace('-', '')}*"))


@pytest.mark.server
def test_serve_says_which_engine_file_is_damaged(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    subprocess.run(["cp", "-r", tiny_engine("eagle3"), engine], check=True)
    repository = write_repository(tmp_path / "repository", engine_dir=engine)
    weights = engine / "rank0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done = furcate("serve", str(repository), *AUTO, "--log-file", str(tmp_path / "triton.log"))
    assert done.returncode == 2
    assert re.fullmatch(
        r"furcate serve: tritonserver ended before it was ready: engine file \S+/rank0.safetensors has changed since it was"
        r" built; build the engine again\. Its log is \S+triton\.log\.\n",
        done.stderr,
    )


def test_ctrl_c_leaves_generate_with_130_and_no_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [*FURCATE, "generate", "Hello", "--url", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"\n")


def test_taken_port_is_one_sentence(listener: int, repository: Path) -> None:
    done = furcate("serve", str(repository), *AUTO[:2], "--grpc-port", str(listener), *AUTO[4:])
    assert done.returncode == 2
    assert done.stderr == (
        f"furcate serve: Port {listener} is taken by another program; choose another with --grpc-port, or --grpc-port"
        " auto.\n"
    )


def test_serving_something_else_is_one_sentence(tmp_path: Path) -> None:
    done = furcate("serve", str(tmp_path), *AUTO)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"furcate serve: '{tmp_path}' is no furcate repository")


def test_generate_without_a_server_is_one_sentence() -> None:
    done = furcate("generate", "Hello", "--url", "grpc://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("furcate generate: No server answers at grpc://127.0.0.1:1 ")
    assert done.stderr.count("\n") == 1


def test_help_lists_every_command_without_loading_torch() -> None:
    start = time.monotonic()
    script = "import sys; from furcate.client.cli import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.stdout.endswith("False\n")
    assert all(command in done.stdout for command in ("serve", "generate", "compare", "inspect", "example", "kernels"))
    assert time.monotonic() - start < 10, "help takes a tenth of a second when nothing else runs"


def test_unknown_command_names_the_known_ones() -> None:
    done = furcate("serv")
    assert done.returncode == 2
    assert done.stderr.startswith("furcate: there is no command 'serv'; the commands are: serve, generate,")


@pytest.mark.parametrize("command", ["serve", "generate", "inspect", "example", "compare", "kernels"])
def test_each_command_explains_itself_with_an_example(command: str) -> None:
    done = furcate(command, "--help")
    assert done.returncode == 0
    assert f"furcate {command} " in done.stdout
    assert "example" in done.stdout.lower()
