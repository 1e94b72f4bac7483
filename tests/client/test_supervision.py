"""`furcate serve` keeps serving: what dies is started again, what hangs is ended, and its end loses no work."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served_command import AUTO, Served, is_alive, wait_until

from furcate.builder.errors import ServerError
from furcate.client import Client
from furcate.client.canary import canary
from furcate.client.shared_memory import SHARED_MEMORY
from furcate.model_repository.generate import write_repository

pytestmark = pytest.mark.server

DEADLINE_S = 90.0
WATCHFUL = ["--canary-interval-s", "1", "--canary-deadline-s", "10"]


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "events.jsonl"


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Collecting)
        self.bodies: list[bytes] = []


class Collecting(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def served(
    tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, log_file: Path, collector: Collector
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("supervised")
    repository = write_repository(root / "repository", engine_dir=tiny_engine("eagle3"))
    logs = ["--json-log", str(log_file), "--log-file", str(root / "triton.log")]
    trace_url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    served = Served(repository, *AUTO, *WATCHFUL, *logs, "--trace-url", trace_url)
    yield served
    served.end()


def assert_serves_again(served: Served) -> None:
    def answers() -> bool:
        try:
            return canary(served.address("gRPC"), deadline_s=DEADLINE_S).num_tokens > 0
        except ServerError:
            return False

    wait_until(answers, "an answer")


def test_traces_of_every_model_reach_the_collector_under_the_caller_s_id(served: Served, collector: Collector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = json.dumps({"text_input": "Hello", "max_tokens": 3}).encode()
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    url = f"{served.address('HTTP')}/v2/models/ensemble/generate"
    with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=DEADLINE_S):
        pass

    def has_spans() -> bool:
        # Triton's exporter sends OTLP as JSON.
        mine = b"".join(sent for sent in collector.bodies if trace_id.encode() in sent)
        return all(name in mine for name in (b"ensemble", b"preprocessing", b"tensorrt_llm", b"postprocessing"))

    wait_until(has_spans, "the request's spans")


def test_a_model_killed_in_mid_stream_is_an_error_and_then_serves_again(served: Served) -> None:
    stub_pid = served.stub_pid("tensorrt_llm")
    with Client(served.address("gRPC"), deadline_s=DEADLINE_S) as client:
        before = client.generate("Hello", max_tokens=20, end_id=-1)
        with client.stream("Hello", max_tokens=390, end_id=-1) as stream:
            next(stream)
            os.kill(stub_pid, signal.SIGKILL)
            with pytest.raises(ServerError) as caught:
                list(stream)
        assert "deadline" not in str(caught.value)
        # A stub that dies with Triton's lock in hand takes the server down with it (see docs/operations.md).
        served.wait_for("Loaded tensorrt_llm again", "The server is up again.")
        assert client.generate("Hello", max_tokens=20, end_id=-1).token_ids == before.token_ids
    assert served.stub_pid("tensorrt_llm") != stub_pid


def test_a_dead_preprocessing_serves_again_while_the_engine_stays(served: Served) -> None:
    server_pid, engine_pid = served.server_pid(), served.stub_pid("tensorrt_llm")
    os.kill(served.stub_pid("preprocessing"), signal.SIGKILL)
    served.wait_for("Loaded preprocessing again")
    assert_serves_again(served)
    assert (served.server_pid(), served.stub_pid("tensorrt_llm")) == (server_pid, engine_pid)


def test_a_killed_server_is_started_again_and_its_models_end(served: Served) -> None:
    server_pid = served.server_pid()
    stub_pids = [served.stub_pid(name) for name in ("preprocessing", "tensorrt_llm", "postprocessing")]
    said = len(served.output)
    os.kill(server_pid, signal.SIGKILL)
    served.wait_for("Starting again in 1 s: tritonserver ended by itself (exit code -9).", after=said)
    served.wait_for("The server is up again.", after=said)
    assert_serves_again(served)
    assert not any(map(is_alive, [server_pid, *stub_pids]))


def test_a_hung_engine_is_ended_and_started_again(served: Served) -> None:
    server_pid, said = served.server_pid(), len(served.output)
    os.kill(served.stub_pid("tensorrt_llm"), signal.SIGSTOP)
    served.wait_for("the server hangs (", after=said)
    served.wait_for("The server is up again.", after=said)
    assert_serves_again(served)
    assert not is_alive(server_pid)


def test_the_json_log_tells_of_events_and_requests_without_texts(served: Served, log_file: Path) -> None:
    with Client(served.address("gRPC"), deadline_s=DEADLINE_S) as client:
        answer = client.generate("Ssecretsecret", max_tokens=7, end_id=-1)
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert {"loading", "ready", "model_died", "model_loaded", "restarting", "restarted", "request"} <= {
        line["event"] for line in lines
    }
    (line,) = (line for line in lines if line.get("request_id") == answer.request_id)
    assert (line["outcome"], line["num_output_tokens"], line["num_input_tokens"]) == ("length", 7, 13)
    assert line["num_target_steps"] == answer.stats.num_target_steps
    assert "secret" not in log_file.read_text()


def test_sigterm_refuses_new_work_and_lets_running_work_finish(served: Served, log_file: Path) -> None:
    with (
        Client(served.address("gRPC"), deadline_s=DEADLINE_S) as client,
        client.stream("Hello", max_tokens=380, end_id=-1) as stream,
    ):
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for("Ending: new work is refused")
        with pytest.raises(ServerError, match=r"^The server is shutting down: it finishes what it has begun"):
            client.generate("Hello", max_tokens=1)
        list(stream)
        assert stream.generation.num_tokens == 380
    server_id = json.loads(log_file.read_text().splitlines()[0])["server"]
    assert served.ended() == 0
    assert served.output.endswith("All work is finished.\nEnded: SIGTERM.\n")
    assert not list(SHARED_MEMORY.glob(f"{server_id.replace('-', '')}*"))
