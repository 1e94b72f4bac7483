"""The real front end (`furcate api`) in front of the tiny server, and OpenAI's own client for it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from furcate.client.server import TritonServer

KEY = "a-key-of-the-tests"
MODEL = "tiny"


@contextmanager
def front_end(engine: Path, server_url: str, log_file: Path, *options: str) -> Iterator[str]:
    """The base URL of a `furcate api` process of our own. Its log goes to a file: a full pipe would hold it up."""
    command = [sys.executable, "-m", "furcate.client.cli", "api", str(engine), "--url", server_url, "--port", "auto"]
    with log_file.open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line.startswith("Listening: "), log_file.read_text()
        yield line.split()[1].removesuffix("/v1")
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=60)
    text = log_file.read_text()
    assert (process.returncode, output) == (0, "Ended.\n"), text
    assert "Traceback" not in text, text


@pytest.fixture(scope="session")
def api_url(
    tiny_server: TritonServer, tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A front end that wants a key and has small limits, for all tests that leave it as it was."""
    keys = tmp_path_factory.mktemp("front_end") / "keys.txt"
    keys.write_text(f"# who may ask\n{KEY}\nanother-key\n")
    options = ["--api-key-file", str(keys), "--model-name", MODEL, "--default-max-tokens", "24"]
    with front_end(tiny_engine("eagle3"), tiny_server.grpc_url, keys.with_name("api.log"), *options) as url:
        yield url


@pytest.fixture
def client(api_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
