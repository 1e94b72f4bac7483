"""What SECURITY.md says of a running server: what listens where, what it refuses, what it writes."""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from furcate.builder.errors import RequestError
from furcate.client import Client
from furcate.client.http_transport import MAX_BODY_BYTES
from furcate.client.installation import find_installation
from furcate.client.server import ServerConfig, TritonServer, server_command
from furcate.model_repository.generate import write_repository

PORTS = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}


def hashes(*directories: Path) -> dict[Path, str]:
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for directory in directories
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_http_listens_on_the_loopback_address_whatever_the_host(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    repository = write_repository(tmp_path / "repository", engine_dir=tiny_engine("eagle3"))
    server = TritonServer(ServerConfig(repository=repository, host="0.0.0.0", **PORTS))
    command = server_command(server, find_installation(tmp_path / "scratch"))
    server.stop()
    addresses = {option for option in command if "-address=" in option}
    assert addresses == {"--http-address=127.0.0.1", "--grpc-address=0.0.0.0", "--metrics-address=0.0.0.0"}


@pytest.mark.server
def test_serving_changes_no_file_of_repository_and_engine(
    tiny_server: TritonServer, tiny_engine: Callable[..., Path]
) -> None:
    engine, repository = tiny_engine("eagle3"), tiny_server.config.repository
    before = hashes(repository, engine)
    with Client(tiny_server.grpc_url) as client:
        client.generate("Hello", max_tokens=4, chat=True)
    assert hashes(repository, engine) == before
    own = {path.relative_to(repository) for path in hashes(repository) if "__pycache__" not in path.parts}
    models = {path.name for path in repository.iterdir()}
    assert {path.parts[0] for path in own} == models
    assert {path.name for path in own} == {"config.pbtxt", "model.py"}
    found = {str(path.relative_to(engine)): each for path, each in hashes(engine).items()}
    manifest = json.loads((engine / "manifest.json").read_text())
    assert {name: each for name, each in found.items() if name != "manifest.json"} == manifest["files"]


@pytest.mark.server
def test_what_changes_the_server_wants_its_own_key(tiny_server: TritonServer) -> None:
    with triton.InferenceServerClient(tiny_server.grpc_url.removeprefix("grpc://")) as client:
        for change in (
            lambda: client.load_model("ensemble"),
            lambda: client.unload_model("ensemble"),
            lambda: client.update_log_settings({"log_verbose_level": 1}),
            lambda: client.update_trace_settings(settings={"trace_rate": "1"}),
            lambda: client.register_system_shared_memory("x", "/furcate-x", 16),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                change()
    for path in ("repository/models/ensemble/unload", "logging", "systemsharedmemory/region/x/register"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{tiny_server.http_url}/v2/{path}", data=b"{}")
        with caught.value as error:
            assert error.code == 403


@pytest.mark.server
def test_the_client_never_sends_the_body_that_would_end_the_server(tiny_server: TritonServer) -> None:
    with Client(tiny_server.http_url) as client:
        with pytest.raises(RequestError, match=rf"over HTTP {MAX_BODY_BYTES} are allowed; use grpc://"):
            client.generate("x" * 5_000_000)
        assert client.generate("Hello", max_tokens=2).num_tokens == 2


@pytest.mark.server
def test_long_lists_and_texts_are_refused_and_the_server_lives(tiny_server: TritonServer) -> None:
    with Client(tiny_server.grpc_url) as client:
        for options, sentence in (
            ({"stop": ["x"] * 2000}, "'stop_words' has 2000 values; 1024 are allowed"),
            ({"bad_words": ["x" * 9_000_000]}, "'bad_words' has 9000000 bytes"),
            ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "x" * 9_000_000}, "has 9000000 bytes"),
            ({"embedding_bias_words": ["x"] * 2000, "embedding_bias_weights": np.ones(2000)}, "2000 values"),
        ):
            with pytest.raises(RequestError, match=sentence):
                client.generate("Hello", **options)
        with pytest.raises(RequestError, match="'text_input' has 9000000 bytes; 8388608 are allowed"):
            client.generate("x" * 9_000_000)
        assert client.generate("Hello", max_tokens=2).num_tokens == 2
