"""What only the owner of a server may ask it: to load a model again. And what anyone may read: its counters.

The server is started with a key of its own for the pages that change it (models, shared memory, tracing, logging).
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from furcate.builder.errors import ServerError
from furcate.client.metrics_text import scrape

CONTROL_HEADER = "furcate-control"
RESTRICTED = "model-repository,shared-memory,trace,logging"
"""Triton's names of the interfaces that want the key."""
LOAD_TIMEOUT_S = 300.0


def load_again(http_url: str, *, key: str, model_dir: Path, generation: int) -> None:
    """Loads a model anew although nothing of it has changed; ServerError when it does not load.

    Triton loads an unchanged model only with another config, so the config gets a parameter that nothing reads. The
    repository itself may be read-only.
    """
    # Protobuf makes the class when the module is imported, where no type checker sees it.
    config = model_config_pb2.ModelConfig()  # pyright: ignore[reportAttributeAccessIssue]
    text_format.Parse((model_dir / "config.pbtxt").read_text(), config)
    config.parameters["furcate_generation"].string_value = str(generation)
    body = {"parameters": {"config": json_format.MessageToJson(config, preserving_proto_field_name=True)}}
    request = urllib.request.Request(
        f"{http_url}/v2/repository/models/{model_dir.name}/load",
        data=json.dumps(body).encode(),
        headers={CONTROL_HEADER: key},
    )
    try:
        with urllib.request.urlopen(request, timeout=LOAD_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as error:
        with error:
            raise ServerError(f"Triton did not load {model_dir.name} again: {error.read(500)!r}") from None
    except OSError as error:
        raise ServerError(f"Triton did not load {model_dir.name} again ({error}).") from None


def counter_sum(metrics_url: str, name: str) -> float | None:
    """The sum of all samples of this name; None when the server does not say."""
    try:
        samples = scrape(metrics_url)
    except ServerError:
        return None
    return samples.sum(name) if name in samples.names() else None
