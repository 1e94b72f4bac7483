"""A client that leaves ends its texts on the server: the pages are back."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import closing
from urllib.parse import urlsplit

import openai
import pytest
from served_gauges import gauge, is_idle_soon

from furcate.client.api import disconnect
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

LONG = {"model": "tiny", "prompt": "Hello", "max_tokens": 380, "ignore_eos": True}


def test_leaving_a_stream_ends_its_text(client: openai.OpenAI, tiny_server: TritonServer) -> None:
    stream = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=380, extra_body={"ignore_eos": True}, stream=True, n=2
    )
    next(iter(stream))
    assert gauge(tiny_server, "furcate_pages_allocated") > 0
    stream.close()
    assert is_idle_soon(tiny_server)


GENERATE = {"text_input": "Hello", "max_tokens": 380, "end_id": -1}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v2/models/ensemble/generate", GENERATE),
        ("/v2/models/ensemble/generate_stream", GENERATE),
        ("/v2/models/ensemble/generate_stream", {**GENERATE, "stream": True}),
    ],
)
def test_a_connection_that_breaks_ends_its_text(
    api_url: str, tiny_server: TritonServer, path: str, asked: dict
) -> None:
    body = json.dumps(asked).encode()
    address = urlsplit(api_url)
    with closing(socket.create_connection((address.hostname, address.port))) as connection:
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: x",
            "Authorization: Bearer a-key-of-the-tests",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        for _ in range(500):
            if gauge(tiny_server, "furcate_live_requests") == 1:
                break
            time.sleep(0.01)
        assert gauge(tiny_server, "furcate_live_requests") == 1
    assert is_idle_soon(tiny_server)


def test_others_do_not_notice(client: openai.OpenAI, tiny_server: TritonServer) -> None:
    def ask(**options):
        return client.completions.create(
            model="tiny", prompt="Hi", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}, **options
        )

    alone = ask().choices[0].text
    leaving, staying = ask(stream=True), ask(stream=True)
    next(iter(leaving))
    leaving.close()
    assert "".join(chunk.choices[0].text for chunk in staying) == alone
    assert is_idle_soon(tiny_server)


def test_a_reader_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "READER_TIMEOUT_S", 0.01)
    has_ended = []

    async def events() -> AsyncIterator[str]:
        try:
            while True:
                yield "more"
        finally:
            has_ended.append(True)

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Future()

    async def receive() -> dict:
        return await asyncio.Future()

    asyncio.run(disconnect.EventStream(events())({"type": "http"}, receive, send))
    assert has_ended == [True]
