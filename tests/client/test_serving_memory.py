"""The server and its models keep the memory that steps work in, unless the operator says otherwise."""

import os
from pathlib import Path

import pytest

from furcate.client.server import KEEPING_MEMORY, TritonServer

pytestmark = pytest.mark.server


def environments_of(server: TritonServer) -> list[dict[str, str]]:
    """Of every process of this server: its own and its models'."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) != os.getsid(server.pid):
                continue
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile
        found.append(dict(pair.split("=", 1) for pair in pairs if "=" in pair))
    return found


def test_every_process_of_a_server_is_told_to_keep_its_memory(tiny_server: TritonServer) -> None:
    environments = environments_of(tiny_server)
    assert len(environments) >= 4, "the server and three models"
    for environment in environments:
        assert environment.items() >= KEEPING_MEMORY.items()


def test_what_the_operator_has_set_holds(tiny_server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert "MALLOC_TRIM_THRESHOLD_" not in tiny_server._environment()
    assert tiny_server._environment()["MALLOC_MMAP_MAX_"] == "0"
