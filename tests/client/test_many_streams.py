"""Far more streams than a step has rows: Triton must know them all at once, none waits in a backlog of its own.

A sequence that comes out of Triton's backlog is forgotten at its first turn ("must specify the START flag"), and its client hears
an error or nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from furcate.client import AsyncClient, Generation
from furcate.client.server import ServerConfig, TritonServer
from furcate.model_repository.generate import write_repository

pytestmark = pytest.mark.server
NUM_STREAMS = 300


def test_hundreds_of_streams_on_a_small_batch_all_get_their_text(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = tiny_engine("eagle3", max_batch_size=4)
    repository = write_repository(tmp_path / "repository", engine_dir=engine)
    ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    with TritonServer(ServerConfig(repository=repository, log_file=tmp_path / "triton.log", **ports)) as server:

        async def texts() -> list[Generation | None]:
            async with AsyncClient(server.grpc_url, deadline_s=200) as client:
                return await asyncio.gather(*(one(client, index) for index in range(NUM_STREAMS)))

        async def one(client: AsyncClient, index: int) -> Generation | None:
            if index % 3 == 0:  # leaves while it waits in line
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.generate("Leaves", max_tokens=300, end_id=-1), 0.02 * index)
                return None
            return await client.generate(f"Stream {index % 3}", max_tokens=24, end_id=-1)

        generations = asyncio.run(texts())
    assert len({(i % 3, generation.token_ids) for i, generation in enumerate(generations) if generation}) == 2
    assert "START flag" not in (tmp_path / "triton.log").read_text()
