"""Streams that end early, by their own end ids, while others run on: each ends where it would alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from furcate.client import Client, Generation
from furcate.client.server import TritonServer
from furcate.decoding.request import FinishReason

pytestmark = pytest.mark.server

PROMPTS = ("Hello", "To furcate", "a", "x = [1, 2]", "0123456789", "branch")
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def client(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url, deadline_s=120) as client:
        yield client


def streamed(client: Client, prompt: str, end_id: int) -> Generation:
    with client.stream(prompt, max_tokens=NUM_TOKENS, end_id=end_id) as stream:
        for _ in stream:
            pass
        return stream.generation


def test_end_ids_end_their_own_streams_while_others_run(client: Client) -> None:
    free = [streamed(client, prompt, end_id=-1) for prompt in PROMPTS]
    assert all(generation.finish_reason is FinishReason.LENGTH for generation in free)
    # Every second stream ends early, each elsewhere; the others have no end id.
    end_ids = [free[i].token_ids[4 + 3 * i] if i % 2 == 0 else -1 for i in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda i: streamed(client, PROMPTS[i], end_ids[i]), range(len(PROMPTS))))
    for alone, generation, end_id in zip(free, together, end_ids, strict=True):
        if end_id < 0:
            assert generation.finish_reason is FinishReason.LENGTH
            assert generation.token_ids == alone.token_ids
        else:
            assert generation.finish_reason is FinishReason.END_ID
            assert generation.token_ids == alone.token_ids[: alone.token_ids.index(end_id) + 1]
            assert generation.num_tokens == len(generation.token_ids)
