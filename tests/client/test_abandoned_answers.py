"""A single answer (`generate`) ends on the server however its caller leaves; streams are in test_cancel."""

import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable

import pytest
from served_command import wait_until
from served_gauges import gauge, is_idle_soon

from furcate.builder.errors import FurcateError, RequestError, ServerError
from furcate.client import Client
from furcate.client.options import Options
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

CALLER = """
import sys
from furcate.client import Client
with Client(sys.argv[1]) as client:
    client.generate("Hello", max_tokens=390, end_id=-1)
"""
"""390 tokens take the tiny engine seconds."""


@pytest.fixture(scope="module", params=["grpc", "http"])
def url(request: pytest.FixtureRequest, tiny_server: TritonServer) -> str:
    return tiny_server.grpc_url if request.param == "grpc" else tiny_server.http_url


def outcomes(server: TritonServer) -> dict[str, float]:
    """How many requests ended in each way."""
    with urllib.request.urlopen(server.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.split() for line in lines if line.startswith("furcate_requests_total")]
    return {labels.split('outcome="')[1].split('"')[0]: float(count) for labels, count in samples}


@pytest.fixture
def assert_cancelled(tiny_server: TritonServer) -> Callable[[], None]:
    """Asserts that since the test began one request was cancelled, none ran to its end, and no page is held."""
    time.sleep(1)  # counters are sent twice a second
    before = outcomes(tiny_server)

    def check() -> None:
        wait_until(lambda: outcomes(tiny_server) != before, "the request to end")
        assert is_idle_soon(tiny_server)
        changed = {name: count - before.get(name, 0) for name, count in outcomes(tiny_server).items()}
        assert {name: count for name, count in changed.items() if count} == {"cancelled": 1}

    return check


def wait_until_it_runs(server: TritonServer) -> None:
    wait_until(lambda: gauge(server, "furcate_pages_allocated") > 0, "the request to run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_is_killed_or_interrupted(
    number: int, url: str, tiny_server: TritonServer, assert_cancelled: Callable[[], None]
) -> None:
    """A killed one says nothing any more: the server must notice by itself."""
    caller = subprocess.Popen([sys.executable, "-c", CALLER, url], stderr=subprocess.PIPE, text=True)
    wait_until_it_runs(tiny_server)
    caller.send_signal(number)
    _, errors = caller.communicate(timeout=60)
    assert_cancelled()
    assert errors == "" if number == signal.SIGKILL else errors.rstrip().endswith("KeyboardInterrupt")


def test_a_deadline(url: str, assert_cancelled: Callable[[], None]) -> None:
    with Client(url, deadline_s=0.3) as client:
        with pytest.raises(ServerError, match=r"not complete after 0.3 s and was given up"):
            client.generate("Hello", max_tokens=390, end_id=-1)
        assert_cancelled()


@pytest.mark.parametrize("options", [{}, {"exclude_input_in_output": False}], ids=["usual", "one_response"])
def test_a_client_that_is_closed(
    url: str, options: Options, tiny_server: TritonServer, assert_cancelled: Callable[[], None]
) -> None:
    client = Client(url)
    raised: list[FurcateError] = []

    def call() -> None:
        try:
            client.generate("Hello", max_tokens=390, end_id=-1, **options)
        except FurcateError as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    wait_until_it_runs(tiny_server)
    client.close()
    caller.join(timeout=60)
    assert [type(error) for error in raised] == [ServerError]
    assert "This client was closed" in str(raised[0])
    assert_cancelled()
    client.close()
    for use in (lambda: client.generate("Hello"), lambda: client.stream("Hello"), lambda: client.cancel("any")):
        with pytest.raises(RequestError, match="This client was closed; make a new one"):
            use()


def test_a_closed_client_ends_its_streams(
    url: str, tiny_server: TritonServer, assert_cancelled: Callable[[], None]
) -> None:
    client = Client(url)
    running, unread = (client.stream("Hello", max_tokens=390, end_id=-1) for _ in range(2))
    next(running)
    client.close()
    assert_cancelled()
    for stream in (running, unread):
        with pytest.raises(ServerError, match="This client was closed"):
            list(stream)
        stream.close()


def test_the_prompt_before_the_text_still_comes_in_one_answer(url: str) -> None:
    """A stream cannot repeat the prompt."""
    with Client(url) as client:
        plain = client.generate("Hello", max_tokens=12, end_id=-1)
        whole = client.generate("Hello", max_tokens=12, end_id=-1, exclude_input_in_output=False)
    assert whole.text == "Hello" + plain.text
    assert (whole.num_tokens, plain.num_tokens) == (12, 12)
