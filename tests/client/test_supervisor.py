"""What the supervisor does, on a server that cannot come up: real processes, no tritonserver."""

import sys
from pathlib import Path

import pytest

from furcate.builder.errors import ConfigError, ServerError
from furcate.client import supervisor as module
from furcate.client.installation import Installation
from furcate.client.server import ServerConfig, TritonServer
from furcate.client.shared_memory import SHARED_MEMORY
from furcate.client.supervisor import SupervisionConfig, Supervisor


def server_that_ends(tmp_path: Path) -> TritonServer:
    """A server whose binary ends at once, saying why in its log as Triton does."""
    (tmp_path / "repository/ensemble").mkdir(parents=True)
    (tmp_path / "repository/ensemble/config.pbtxt").touch()
    binary = tmp_path / "tritonserver"
    binary.write_text(f"#!{sys.executable}\nprint('error: the disk is on fire')\n")
    binary.chmod(0o755)
    ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    server = TritonServer(ServerConfig(repository=tmp_path / "repository", log_file=tmp_path / "triton.log", **ports))
    server._installation = Installation(binary=binary, backend_directory=tmp_path, cache_directory=tmp_path)
    return server


def test_a_server_that_never_comes_up_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    server = server_that_ends(tmp_path)
    with pytest.raises(
        ServerError, match=r"ended before it was ready: the disk is on fire\. Its log is \S+triton\.log\.$"
    ):
        server.start()
    assert not list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))
    assert not server._scratch.exists()


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    server = server_that_ends(tmp_path)
    server.log_file = tmp_path / "no such folder/triton.log"
    with pytest.raises(ServerError, match=r"tritonserver cannot be started: .*no such folder"):
        server.start()


def test_restarts_in_vain_end_after_so_many_with_longer_pauses_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_that_ends(tmp_path)
    monkeypatch.setattr(TritonServer, "_wait_until_ready", lambda *arguments: None)
    server.start()
    monkeypatch.undo()
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pauses.append(seconds) if seconds >= 1 else None)
    events: list[tuple[str, str]] = []
    watcher = Supervisor(
        server, SupervisionConfig(most_restarts=3), lambda event, sentence, **facts: events.append((event, sentence))
    )
    server._process.wait(30)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(ServerError, match=r"the disk is on fire.*, and 3 restarts in a row did not help"):
        watcher.look()
    assert pauses == [1, 2, 4]
    assert [event for event, _ in events] == ["restarting"] * 3
    assert events[0][1] == "Starting again in 1 s: tritonserver ended by itself (exit code 0)."
    server.stop()
    assert not list(SHARED_MEMORY.glob(f"{server.shm_prefix}*"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"canary_interval_s": 0}, "--canary-interval-s is 0; it must be above 0 seconds."),
        ({"canary_deadline_s": -1}, "--canary-deadline-s is -1; it must be above 0 seconds."),
        ({"most_restarts": -1}, "--most-restarts is -1; it must be at least 0."),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SupervisionConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trace_rate": 0}, "--trace-rate is 0; it must be at least 1"),
        ({"trace_url": "localhost:4318"}, "--trace-url is 'localhost:4318'; it must be an address such as"),
    ],
)
def test_trace_settings_out_of_range_are_refused(settings: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ServerConfig(repository=tmp_path, **settings)
