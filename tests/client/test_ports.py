"""Ports: given, found, taken."""

import socket

import pytest

from furcate.builder.errors import ConfigError
from furcate.client.ports import resolve_ports


def test_auto_finds_three_different_free_ports() -> None:
    ports = resolve_ports("auto", "auto", "auto")
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    for port in (ports.http, ports.grpc, ports.metrics):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_taken_port_is_named_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} is taken by another program; .* --metrics-port auto"):
            resolve_ports("auto", "auto", port)


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1", ""])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=r"--grpc-port is .*it can be 1 to 65535, or auto"):
        resolve_ports("auto", port, "auto")


def test_one_port_for_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="must differ"):
        resolve_ports("8000", "8000", "auto")
