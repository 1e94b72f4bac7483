"""The three ports of a server: given, or found free."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

from furcate.builder.errors import ConfigError

HOST = "127.0.0.1"
ALL_ADDRESSES = "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class Ports:
    """HTTP on the loopback address; gRPC and metrics there too, unless the server was given another host."""

    http: int
    grpc: int
    metrics: int


def check_host(host: str) -> None:
    """ConfigError when `host` is no IPv4 address that this machine listens on."""
    try:
        ipaddress.IPv4Address(host)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
    except (ValueError, OSError):
        raise ConfigError(
            f"--host is '{host}'; it must be an IPv4 address of this machine, or {ALL_ADDRESSES} for all of them."
        ) from None


def resolve_ports(http: int | str, grpc: int | str, metrics: int | str, *, host: str = HOST) -> Ports:
    """Ports that nobody listens on; "auto" takes any free one. ConfigError names a port that is taken.

    HTTP is asked for on the loopback address, the other two on `host`. Triton's HTTP listener shares a busy port in
    silence, so this is asked before the server starts.
    """
    asked = {"--http-port": http, "--grpc-port": grpc, "--metrics-port": metrics}
    fixed = [port for port in asked.values() if port != "auto"]
    if len(set(fixed)) < len(fixed):
        raise ConfigError(f"The three ports must differ, but they are {http}, {grpc} and {metrics}.")
    sockets: list[socket.socket] = []
    try:
        for option, port in asked.items():
            sockets.append(listening_socket(option, port, HOST if option == "--http-port" else host))
        numbers = [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
    return Ports(http=numbers[0], grpc=numbers[1], metrics=numbers[2])


def listening_socket(option: str, port: int | str, host: str) -> socket.socket:
    """A socket that listens on a port that nobody else has; "auto" takes any free one. ConfigError names `option`."""
    number = _number(option, port)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, number))
        listener.listen(1)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {number} is taken by another program; choose another with {option}, or {option} auto."
            ) from None
        raise ConfigError(f"Port {number} cannot be used ({error.strerror}); choose another with {option}.") from None
    return listener


def _number(option: str, port: int | str) -> int:
    if port == "auto":
        return 0
    try:
        number = int(port)
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        raise ConfigError(f"{option} is {port}; it can be 1 to 65535, or auto.")
    return number
