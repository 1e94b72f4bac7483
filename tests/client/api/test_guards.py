"""Keys, ids and limits, on the real front end and on the guards alone."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from starlette.types import Message

from furcate.builder.errors import ConfigError
from furcate.client.api import guards
from furcate.client.api.guards import Guards, RequestIds
from furcate.client.api.keys import KeyRing, keys_from
from furcate.client.api.settings import DEFAULT_MAX_BODY_BYTES, ApiSettings

BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}


@pytest.fixture
def http(api_url: str) -> Iterator[httpx2.Client]:
    headers = {"Authorization": "Bearer a-key-of-the-tests"}
    with httpx2.Client(base_url=api_url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.server
@pytest.mark.parametrize("key", ["wrong", "a-key-of-the-test", "a-key-of-the-tests2", "clé", "x" * 1000])
def test_a_wrong_key_is_refused_everywhere_but_where_probes_ask(key: str, http: httpx2.Client) -> None:
    headers = {"Authorization": f"Bearer {key}".encode()}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
        answer = http.request(method, path, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert http.get("/health", headers=headers).json() == {"status": "ok"}


@pytest.mark.server
def test_openais_client_gets_its_own_error_for_a_wrong_key(api_url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{api_url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"),
    ):
        client.models.list()


@pytest.mark.server
def test_every_key_of_the_file_is_right(http: httpx2.Client) -> None:
    for scheme in ("Bearer another-key", "bearer  another-key"):
        assert http.get("/v1/models/tiny", headers={"Authorization": scheme}).json()["id"] == "tiny"


@pytest.mark.server
def test_five_megabytes_are_refused_and_the_server_lives(http: httpx2.Client) -> None:
    too_long = {**BODY, "prompt": "x" * 5_000_000}
    answer = http.post("/v1/completions", json=too_long)
    assert answer.status_code == 413
    assert answer.json()["error"] == {
        "message": f"The request's body has more than {DEFAULT_MAX_BODY_BYTES} bytes; send a shorter one.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_large",
    }
    assert http.post("/v1/completions", json=BODY).json()["choices"]


@pytest.mark.server
@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_reads_only_after_all_is_sent_still_gets_the_refusal(api_url: str, is_chunked: bool) -> None:
    """A connection closed with bytes unread is reset, and then what was sent to the client is lost too."""
    address, piece = urlsplit(api_url), b"x" * 65536
    num_pieces = 5_000_000 // len(piece)
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {num_pieces * len(piece)}"
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Authorization: Bearer a-key-of-the-tests", length)
    with closing(socket.create_connection((address.hostname, address.port), timeout=30)) as connection:
        connection.sendall("\r\n".join((*lines, "Content-Type: application/json", "", "")).encode())
        for _ in range(num_pieces):
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            time.sleep(0.002)
        connection.sendall(b"0\r\n\r\n" if is_chunked else b"")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"send a shorter one" in answer


@pytest.mark.server
def test_a_body_of_unknown_length_is_counted_as_it_comes(http: httpx2.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 100_000

    answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert http.get("/v1/models").status_code == 200


@pytest.mark.server
def test_ids_come_back_or_are_made(http: httpx2.Client) -> None:
    assert (
        http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    )
    assert http.get("/nowhere", headers={"X-Request-Id": "mine-2"}).headers["x-request-id"] == "mine-2"
    for wrong in ("", "a b", "x" * 129, "{}"):
        assert http.get("/v1/models", headers={"X-Request-Id": wrong}).headers["x-request-id"].startswith("req-")


@pytest.mark.server
def test_a_header_without_end_is_cut_off(api_url: str) -> None:
    address = urlsplit(api_url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


async def answer_of(app, *messages: Message, headers: list[tuple[bytes, bytes]] | None = None) -> int:
    """The status an app answers these messages with; after them nothing more comes."""
    waiting, sent = list(messages), []

    async def receive() -> Message:
        return waiting.pop(0) if waiting else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers or []}
    await app(scope, receive, send)
    return sent[0]["status"]


async def reads_everything(scope, receive, send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_more_than_the_limit_of_running_requests_is_refused_at_once() -> None:
    async def main() -> tuple[int, int, int]:
        release = asyncio.Event()

        async def waits(scope, receive, send) -> None:
            await release.wait()
            await reads_everything(scope, receive, send)

        app = Guards(waits, ApiSettings(model_name="m", created=0, max_active_requests=1))
        message = {"type": "http.request", "body": b""}
        first = asyncio.ensure_future(answer_of(app, message))
        await asyncio.sleep(0)
        second = await answer_of(app, message)
        release.set()
        return await first, second, await answer_of(app, message)

    assert asyncio.run(main()) == (200, 503, 200)


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "BODY_TIMEOUT_S", 0.01)
    app = Guards(reads_everything, ApiSettings(model_name="m", created=0))
    with pytest.raises(guards.ApiError, match=r"did not come within 0\.01 s") as caught:
        asyncio.run(answer_of(app, {"type": "http.request", "body": b"{", "more_body": True}))
    assert caught.value.status == 408


def test_a_fault_of_ours_is_said_without_its_details_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scope, receive, send) -> None:
        raise RuntimeError("a secret")

    with caplog.at_level("INFO", logger="furcate.api"):
        assert asyncio.run(answer_of(RequestIds(fails), headers=[(b"x-request-id", b"r1")])) == 500
    assert "request r1 failed" in caplog.text
    assert '"request_id": "r1"' in caplog.messages[-1]


def test_keys_are_compared_whole() -> None:
    ring = KeyRing(["one-key", "two-key"])
    assert ring.has(b"one-key")
    assert ring.has(b"two-key")
    assert not any(ring.has(key) for key in (b"", b"one-ke", b"one-key ", "clé".encode()))
    assert not KeyRing([])


@pytest.mark.parametrize("text", ["", "# only a comment\n\n", "with space\n", "cl\u00e9\n"])
def test_a_key_file_without_a_good_key_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds no key|cannot be read|has a space"):
        keys_from([], file)


@pytest.mark.server
@pytest.mark.slow
def test_a_thousand_idle_connections_stand_in_nobodys_way(api_url: str, http: httpx2.Client) -> None:
    address = urlsplit(api_url)
    with ExitStack() as connections:
        for number in range(1000):
            connection = connections.enter_context(closing(socket.create_connection((address.hostname, address.port))))
            if number % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        assert http.post("/v1/completions", json=BODY).json()["choices"]
