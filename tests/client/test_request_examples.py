"""The files in examples/requests, run as they stand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from furcate.client import Client
from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[2] / "examples/requests"


def output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_generate_with_curl(tiny_server: TritonServer) -> None:
    answer = json.loads(output_of(str(EXAMPLES / "generate.sh"), tiny_server.http_url))
    with Client(tiny_server.grpc_url) as client:
        same = client.generate("Why is the sky blue?", chat=True, max_tokens=64, stop=["\n\n"])
    assert answer["text_output"] == same.text
    assert answer["output_token_ids"] == list(same.token_ids)
    assert answer["finish_reason"] == same.finish_reason
    assert answer["num_target_steps"] == same.stats.num_target_steps


def test_generate_stream_with_curl(tiny_server: TritonServer) -> None:
    lines = [
        line for line in output_of(str(EXAMPLES / "generate_stream.sh"), tiny_server.http_url).splitlines() if line
    ]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
    with Client(tiny_server.grpc_url) as client:
        same = client.generate("Once upon a time", max_tokens=64, temperature=0.8, top_p=0.95, seed=7)
    assert len(pieces) > 3
    assert "".join(piece["text_output"] for piece in pieces) == same.text
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == same.finish_reason


def test_python_example(tiny_server: TritonServer) -> None:
    text = output_of(sys.executable, str(EXAMPLES / "generate.py"), tiny_server.grpc_url)
    assert "tokens, tau " in text
    assert "tokens/s]" in text
    assert text.endswith("[left]\n")


def test_the_readme_lists_every_file() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in readme for path in EXAMPLES.iterdir() if path.name != "README.md")
