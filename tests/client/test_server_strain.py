"""A server among many, slow and silent clients, with a full /dev/shm, or with its ports wanted by another."""

import json
import resource
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from served_command import AUTO, FURCATE, Served

from furcate.builder.errors import FurcateError, RequestError
from furcate.client import Client
from furcate.client.server import TritonServer
from furcate.model_repository.generate import write_repository

pytestmark = pytest.mark.server

DEADLINE_S = 90.0
IN_SMALL_MEMORY = ["unshare", "--map-root-user", "--mount", "bash", "-c"]


@pytest.fixture(scope="module")
def repository(tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("strain") / "repository", engine_dir=tiny_engine("eagle3"))


@pytest.mark.parametrize("port", ["http", "grpc", "metrics"])
def test_a_second_server_on_a_port_is_one_sentence(port: str, tiny_server: TritonServer, repository: Path) -> None:
    number = getattr(tiny_server.ports, port)
    others = [item for part in ("http", "grpc", "metrics") if part != port for item in (f"--{part}-port", "auto")]
    done = subprocess.run(
        [*FURCATE, "serve", str(repository), f"--{port}-port", str(number), *others],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"furcate serve: Port {number} is taken by another program; choose another with --{port}-port, or --{port}-port"
        " auto.\n"
    )


def test_a_thousand_idle_connections_take_nothing_from_others(tiny_server: TritonServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    idle: list[socket.socket] = []
    try:
        for number in range(1000):
            port = tiny_server.ports.http if number % 2 else tiny_server.ports.grpc
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        for url in (tiny_server.grpc_url, tiny_server.http_url):
            with Client(url, deadline_s=DEADLINE_S) as client:
                assert client.generate("Hello", max_tokens=8, end_id=-1).num_tokens == 8
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_slow_reader_gets_everything_and_holds_up_nobody(tiny_server: TritonServer) -> None:
    body = json.dumps({"text_input": "Hello", "max_tokens": 200, "end_id": -1, "stream": True})
    request = (
        "POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    with Client(tiny_server.grpc_url, deadline_s=DEADLINE_S) as client, socket.socket() as reader:
        alone = client.generate("Hello", max_tokens=200, end_id=-1)
        # So small that the answer does not fit: the server has to keep what is not read.
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.settimeout(DEADLINE_S)
        reader.connect(("127.0.0.1", tiny_server.ports.http))
        reader.sendall(request.encode())
        slow = client.stream("Hello", max_tokens=200, end_id=-1)
        next(slow)
        assert client.generate("Hello", max_tokens=200, end_id=-1).token_ids == alone.token_ids
        time.sleep(1)
        for _ in slow:
            pass
        assert slow.generation.token_ids == alone.token_ids
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            part = reader.recv(512)
            assert part, "the connection was closed before the last chunk"
            received += part
    lines = [line for line in received.decode().split("\n") if line.startswith("data: ")]
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]
    assert "".join(pieces) == alone.text


@pytest.fixture
def small_memory() -> Callable[[int], list[str]]:
    """The beginning of a command that runs in a mount namespace of its own, whose /dev/shm holds so many MiB."""
    done = subprocess.run(
        [*IN_SMALL_MEMORY, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, text=True, timeout=30
    )
    if done.returncode != 0:
        pytest.skip(f"this machine does not allow mount namespaces: {done.stderr}")
    return lambda size: [*IN_SMALL_MEMORY, f'mount -t tmpfs -o size={size}m tmpfs /dev/shm && exec "$@"', "bash"]


def test_a_dev_shm_that_is_too_small_is_one_sentence(
    repository: Path, small_memory: Callable[[int], list[str]]
) -> None:
    command = [*small_memory(40), *FURCATE, "serve", str(repository), *AUTO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "furcate serve: /dev/shm has 40 MiB free, but 3 models begin with 16 MiB each; give it"
    )


def test_a_full_dev_shm_fails_the_request_that_needs_more_and_no_other(
    repository: Path, tmp_path: Path, small_memory: Callable[[int], list[str]]
) -> None:
    served = Served(repository, *AUTO, "--log-file", str(tmp_path / "triton.log"), prefix=small_memory(56))
    try:
        with Client(served.address("gRPC"), deadline_s=DEADLINE_S) as client:
            before = client.generate("Hello", max_tokens=8, end_id=-1)
            # Its tokens take 24 MB, and then the refusal of so long a prompt needs room too.
            with pytest.raises(FurcateError) as caught:
                client.generate("x" * 6_000_000, max_tokens=8)
            assert "\n" not in str(caught.value)
            assert not isinstance(caught.value, RequestError) or "limit is 400" not in str(caught.value)
            assert client.generate("Hello", max_tokens=8, end_id=-1).token_ids == before.token_ids
    finally:
        assert served.end() == 0
    assert "has died" not in served.output
