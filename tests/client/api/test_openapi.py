"""The OpenAPI document, held against the running front end by requests made from it."""

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from served_gauges import is_idle_soon

from furcate.client.server import TritonServer

pytestmark = pytest.mark.server

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,missing_required_header,unsupported_method,ignored_auth"
)
"""All of schemathesis' own but positive_data_acceptance: a request can be well-formed and ask for more than an engine has."""


def fuzz(url: str, directory: Path, *options: str, timeout_s: float = 500) -> None:
    """Runs schemathesis on the front end at `url`; an AssertionError shows what it found."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", f"--checks={CHECKS}"]
    done = subprocess.run(
        [*command, "--header=Authorization: Bearer a-key-of-the-tests", "--request-timeout=30", "--no-color", *options],
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=timeout_s,
    )
    assert done.returncode == 0, "\n".join(line[:300] for line in (done.stdout + done.stderr).splitlines())


def test_requests_made_from_the_document_are_answered_as_it_says(
    api_url: str, tmp_path: Path, tiny_server: TritonServer
) -> None:
    fuzz(api_url, tmp_path, "--phases=fuzzing", "--max-examples=10", "--seed=1")
    assert is_idle_soon(tiny_server)


@pytest.mark.slow
def test_many_requests_made_from_the_document_are_answered_as_it_says(
    api_url: str, tmp_path: Path, tiny_server: TritonServer
) -> None:
    fuzz(api_url, tmp_path, "--max-examples=400", "--seed=2", timeout_s=1800)
    assert is_idle_soon(tiny_server)


def test_the_document_needs_no_key_and_names_the_model(api_url: str) -> None:
    document = httpx2.get(f"{api_url}/openapi.json", trust_env=False).json()
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
    assert {path for path in document["paths"] if path.startswith("/v1/")} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
    }
