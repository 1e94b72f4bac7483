"""What `furcate serve` tells the models it runs, through their environment; a server started by hand tells nothing."""

import os
from pathlib import Path

DRAIN_FILE = "FURCATE_DRAIN_FILE"
"""Names a file: once it exists the server is about to end, and takes nothing new."""
JSON_LOG = "FURCATE_JSON_LOG"
"""Names a file that gets a line of JSON for each request that ends."""

SHUTTING_DOWN = (
    "The server is shutting down: it finishes what it has begun and takes nothing new; send the request again later, or to"
    " another server."
)


def refusal_of_new_work() -> str | None:
    """The sentence to refuse a new request with while the server is about to end, else None."""
    path = os.environ.get(DRAIN_FILE)
    return SHUTTING_DOWN if path is not None and os.path.exists(path) else None


def json_log_path() -> Path | None:
    """Where ended requests are logged, or None."""
    path = os.environ.get(JSON_LOG)
    return None if path is None else Path(path)
