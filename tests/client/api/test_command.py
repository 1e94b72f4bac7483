"""`furcate api` as a command."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

COMMAND = [sys.executable, "-m", "furcate.client.cli", "api"]


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine("eagle3")


def refusal(*options: str) -> str:
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_an_open_address_wants_keys(engine: Path) -> None:
    assert "--host 0.0.0.0 lets other machines in; name the keys" in refusal(str(engine), "--host", "0.0.0.0")


def test_wrong_settings_are_named(engine: Path, tmp_path: Path) -> None:
    assert "--max-body-bytes is 0; it must be above 0." in refusal(str(engine), "--max-body-bytes", "0")
    assert f"'{tmp_path}/none' is no directory" in refusal(f"{tmp_path}/none", "--port", "auto")
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = str(other.getsockname()[1])
        assert f"Port {port} is taken by another program; choose another with --port" in refusal(
            str(engine), "--port", port
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_server_it_says_so_and_ends_in_order(number: signal.Signals, engine: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
        url = f"grpc://127.0.0.1:{nobody.getsockname()[1]}"
    process = subprocess.Popen(
        [*COMMAND, str(engine), "--url", url, "--port", "auto"],
        # A test run in the background ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    base = process.stdout.readline().split()[1].removesuffix("/v1")
    name = httpx2.get(f"{base}/v1/models", trust_env=False).json()["data"][0]["id"]
    body = {"model": name, "prompt": "x"}
    answers = [
        httpx2.get(f"{base}/health", timeout=60, trust_env=False),
        httpx2.post(f"{base}/v1/completions", json=body, timeout=60, trust_env=False),
        httpx2.post(f"{base}/v1/completions", json={**body, "stream": True}, timeout=60, trust_env=False),
    ]
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert [answer.status_code for answer in answers] == [503, 502, 502]
    assert all(f"No server answers at {url}" in answer.json()["error"]["message"] for answer in answers)
    assert process.returncode == (0 if number is signal.SIGTERM else 130)
    assert "Traceback" not in log
    assert '"path": "/v1/completions", "status": 502' in log
