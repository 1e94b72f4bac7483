"""A server that dies under its clients: they learn of it long before their deadline."""

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from furcate.builder.errors import ServerError
from furcate.client import Client
from furcate.client.canary import canary
from furcate.client.server import ServerConfig, TritonServer
from furcate.client.shared_memory import SHARED_MEMORY
from furcate.model_repository.generate import write_repository

pytestmark = pytest.mark.server

DEADLINE_S = 60.0


def server_in(root: Path, engine_dir: Path) -> TritonServer:
    """A server that is not started yet, of a repository of its own."""
    repository = write_repository(root / "repository", engine_dir=engine_dir)
    ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    return TritonServer(ServerConfig(repository=repository, log_file=root / "triton.log", **ports))


@pytest.fixture(scope="module")
def bereft_server(tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose engine's stub was killed while it had nothing to do."""
    with server_in(tmp_path_factory.mktemp("bereft"), tiny_engine("eagle3")) as server:
        os.kill(stub_pid(server, "tensorrt_llm"), signal.SIGKILL)
        yield server


def stub_pid(server: TritonServer, model_name: str) -> int:
    """The process that runs a Python model of this server."""
    model_file = f"{server.config.repository}/{model_name}/1/model.py"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            arguments = (process / "cmdline").read_bytes().decode().split("\0")
            if model_file in arguments and arguments[0].endswith("triton_python_backend_stub"):
                return int(process.name)
    raise AssertionError(f"no process runs {model_file}")


def seconds_until_error(client: Client, strike: Callable[[], None]) -> float:
    """From the blow, struck in mid-stream, to the client's ServerError."""
    with client.stream("Hello", max_tokens=390, end_id=-1) as stream:
        next(stream)
        strike()
        start = time.monotonic()
        with pytest.raises(ServerError) as caught:
            for _ in stream:
                pass
    assert "\n" not in str(caught.value)
    return time.monotonic() - start


def test_stub_killed_in_mid_stream_is_an_error_before_the_deadline(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    # Whether the server outlives it is Triton's luck: a stub that dies with their common lock in hand takes it along.
    with (
        server_in(tmp_path, tiny_engine("eagle3")) as server,
        Client(server.grpc_url, deadline_s=DEADLINE_S) as client,
    ):
        pid = stub_pid(server, "tensorrt_llm")
        assert seconds_until_error(client, lambda: os.kill(pid, signal.SIGKILL)) < DEADLINE_S / 4


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_with_a_dead_stub_gives_errors_not_silence(scheme: str, bereft_server: TritonServer) -> None:
    url = bereft_server.grpc_url if scheme == "grpc" else bereft_server.http_url
    with Client(url, deadline_s=DEADLINE_S) as client, pytest.raises(ServerError, match="not healthy"):
        client.generate("Hello", max_tokens=4)


def test_canary_tells_a_dead_model_from_a_ready_server(bereft_server: TritonServer) -> None:
    with urllib.request.urlopen(f"{bereft_server.http_url}/v2/health/ready") as ready:
        assert ready.status == 200
    with pytest.raises(ServerError, match="not healthy"):
        canary(bereft_server.grpc_url, deadline_s=DEADLINE_S)


def test_server_killed_while_it_owes_an_answer_is_an_error_before_the_deadline(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    server = server_in(tmp_path, tiny_engine("eagle3"))
    with server, Client(server.grpc_url, deadline_s=DEADLINE_S) as grpc, Client(server.http_url) as http:
        with http.stream("Hello", max_tokens=390, end_id=-1) as other:
            next(other)
            assert seconds_until_error(grpc, lambda: os.kill(server.pid, signal.SIGKILL)) < DEADLINE_S / 4
            with pytest.raises(ServerError, match="broke off"):
                for _ in other:
                    pass
        with pytest.raises(ServerError, match="No server answers at grpc://"):
            grpc.generate("Hello", max_tokens=4)
    assert list(SHARED_MEMORY.glob(f"{server.shm_prefix}*")) == []


def test_deadline_ends_the_wait_and_the_work(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url, deadline_s=0.2) as client:
        start = time.monotonic()
        with pytest.raises(ServerError, match=r"not complete after 0\.2 s"):
            client.generate("Hello", max_tokens=390, end_id=-1)
        assert time.monotonic() - start < 5
