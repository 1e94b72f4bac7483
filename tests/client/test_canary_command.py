"""`furcate canary` as a probe runs it, and the addresses that a server opens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from furcate.builder.errors import ConfigError
from furcate.client.installation import Installation
from furcate.client.ports import resolve_ports
from furcate.client.server import ServerConfig, TritonServer, server_command

CANARY = [sys.executable, "-m", "furcate.client.cli", "canary"]


def canary(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CANARY, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble/config.pbtxt").touch()
    return tmp_path


def addresses(config: ServerConfig) -> dict[str, str]:
    server = TritonServer(config)
    try:
        command = server_command(server, Installation(binary=Path(), backend_directory=Path(), cache_directory=Path()))
        return {
            part: option.split("=")[1]
            for option in command
            for part in ("http", "grpc", "metrics")
            if f"--{part}-address" in option
        }
    finally:
        server.stop()


@pytest.mark.server
@pytest.mark.parametrize("protocol", ["grpc_url", "http_url"])
def test_a_server_that_answers_is_ok(tiny_server: TritonServer, protocol: str) -> None:
    url = getattr(tiny_server, protocol)
    done = canary("--url", url, "--deadline-s", "60")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok: ")
    assert done.stdout.endswith(f" s from {url}\n")


def test_no_server_is_one_sentence_and_2() -> None:
    done = canary("--url", "grpc://127.0.0.1:1", "--deadline-s", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("furcate canary: No server answers at grpc://127.0.0.1:1 ")


def test_a_probe_does_not_load_torch() -> None:
    script = "import sys, furcate.client.cli_canary; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "False\n"


@pytest.mark.parametrize("deadline", ["0", "-1"])
def test_a_deadline_is_above_zero(deadline: str) -> None:
    done = canary("--deadline-s", deadline)
    assert done.returncode == 2
    assert done.stderr == f"furcate canary: --deadline-s is {deadline}; it must be above 0 seconds.\n"


def test_host_opens_grpc_and_metrics_but_never_http(repository: Path) -> None:
    auto = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    everywhere = addresses(ServerConfig(repository=repository, host="0.0.0.0", **auto))
    assert everywhere == {"http": "127.0.0.1", "grpc": "0.0.0.0", "metrics": "0.0.0.0"}
    inside = addresses(ServerConfig(repository=repository, **auto))
    assert set(inside.values()) == {"127.0.0.1"}


def test_urls_of_all_addresses_lead_to_the_loopback_address(repository: Path) -> None:
    auto = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    server = TritonServer(ServerConfig(repository=repository, host="0.0.0.0", **auto))
    server.stop()
    assert server.grpc_url == f"grpc://127.0.0.1:{server.ports.grpc}"
    assert server.metrics_url == f"http://127.0.0.1:{server.ports.metrics}/metrics"


@pytest.mark.parametrize("host", ["all", "192.0.2.1", "::1", ""])
def test_a_host_that_is_not_this_machines_is_refused(repository: Path, host: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--host is '{host}'; it must be an IPv4 address of this machine, or 0\.0\.0\.0"
    ):
        TritonServer(ServerConfig(repository=repository, host=host))


def test_ports_of_another_host_are_asked_for_there() -> None:
    ports = resolve_ports("auto", "auto", "auto", host="0.0.0.0")
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
