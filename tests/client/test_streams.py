"""Many streams at once on the real server: each gets what it would get alone, and nothing stays behind."""

import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.client import Client, Generation
from furcate.client.server import TritonServer
from furcate.decoding.compare import generate
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.prompts import Prompt
from furcate.decoding.request import SamplingParams
from furcate.decoding.scheduler import Scheduler

pytestmark = pytest.mark.server

PROMPTS = ("a", "Hello", "To furcate is to branch. " * 12, "日本語 and emoji 🌳🌿", "x = [1, 2, 3]\n" * 5, "0123456789")
SHAPINGS = ({}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 50, "top_p": 0.8})


def prompt_of(index: int) -> str:
    return PROMPTS[index % len(PROMPTS)]


def options_of(index: int) -> dict:
    """A mix of lengths, endings, temperatures and seeds; every third request is greedy."""
    options: dict = {"max_tokens": (1, 7, 24, 33)[index % 4], "end_id": (-1, 30)[index % 2]}
    if index % 3:
        options |= {"temperature": (0.7, 1.3)[index % 2], "seed": 100 + index, **SHAPINGS[index % 4]}
    return options


@pytest.fixture(scope="module")
def client(tiny_server: TritonServer) -> Iterator[Client]:
    with Client(tiny_server.grpc_url, deadline_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_engine: Callable[..., Path]) -> Callable[[int], tuple[int, ...]]:
    """The tokens of request `index` by plain decoding in this process: one token a step, nothing of Triton."""
    engine = read_engine(tiny_engine("eagle3"))
    plain = Scheduler(TorchExecutor(engine), TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(engine.tokenizer_dir)
    known: dict[int, tuple[int, ...]] = {}

    def tokens(index: int) -> tuple[int, ...]:
        if index not in known:
            options = options_of(index)
            end_id = options.pop("end_id")
            sampling = SamplingParams(end_ids=() if end_id < 0 else (end_id,), **options)
            text = prompt_of(index)
            prompt = Prompt(text=text, input_ids=tuple(tokenizer.encode(text)))
            known[index] = generate(plain, prompt, sampling).token_ids
        return known[index]

    return tokens


def streamed(client: Client, index: int) -> Generation:
    with client.stream(prompt_of(index), **options_of(index)) as stream:
        for _ in stream:
            pass
        return stream.generation


def gauges(server: TritonServer) -> dict[str, float]:
    with urllib.request.urlopen(server.metrics_url) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("furcate_")]
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_every_stream_is_identical_to_plain_decoding_alone(
    num_streams: int, client: Client, expected: Callable[[int], tuple[int, ...]], tiny_server: TritonServer
) -> None:
    with ThreadPoolExecutor(num_streams) as pool:
        generations = list(pool.map(lambda index: streamed(client, index), range(num_streams)))
    for index, generation in enumerate(generations):
        assert generation.token_ids == expected(index), f"request {index}: {options_of(index)}"
        assert generation.num_tokens == len(generation.token_ids)
    after = gauges(tiny_server)
    assert after["furcate_pages_allocated"] == after["furcate_pages_committed"] == 0
    assert after["furcate_live_requests"] == 0


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("index", [2, 3])
def test_one_response_and_stream_agree(scheme: str, index: int, tiny_server: TritonServer) -> None:
    url = tiny_server.grpc_url if scheme == "grpc" else tiny_server.http_url
    with Client(url) as client:
        whole = client.generate(prompt_of(index), **options_of(index))
        stream = client.stream(prompt_of(index), **options_of(index))
        pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == stream.generation.text == whole.text
    assert stream.generation.token_ids == whole.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert stream.generation.finish_reason == whole.finish_reason
    assert len(pieces) > 3


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_text_may_hold_what_unicode_ends_lines_with(scheme: str, tiny_server: TritonServer) -> None:
    text = "a\u2028b\u0085c\nd"
    url = tiny_server.grpc_url if scheme == "grpc" else tiny_server.http_url
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": text}
    with Client(url) as client:
        assert client.generate("Hello", max_tokens=20, **guide).text == text
        assert "".join(delta.text for delta in client.stream("Hello", max_tokens=20, **guide)) == text


def test_counts_and_times_are_consistent(client: Client) -> None:
    generation = client.generate("Hello", max_tokens=24, end_id=-1)
    stats = generation.stats
    assert stats.num_prompt_tokens == 5
    assert generation.num_tokens == 24
    assert generation.tau == 23 / stats.num_target_steps
    assert generation.tau >= 1.0
    assert stats.num_accepted_draft_tokens == 24 - 1 - stats.num_target_steps
    assert generation.acceptance_rate == stats.num_accepted_draft_tokens / stats.num_draft_tokens
    assert stats.num_allocated_pages > 0
    times = (stats.arrival_time_ns, stats.first_scheduled_time_ns, stats.first_token_time_ns, stats.last_token_time_ns)
    assert list(times) == sorted(times)
    assert 0 < (stats.last_token_time_ns - stats.arrival_time_ns) / 1e9 <= generation.duration_s
