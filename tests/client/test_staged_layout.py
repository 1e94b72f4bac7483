"""The `staged` layout on the real server: the same names, and the same text token by token, as `fused`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from furcate.builder.config import Layout
from furcate.client import Client
from furcate.client.metrics_text import scrape
from furcate.client.results import Generation
from furcate.client.server import ServerConfig, TritonServer
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.generate import write_repository

pytestmark = pytest.mark.server

OPTIONS = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_k": 30, "top_p": 0.9},
    {"return_log_probs": True},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
]
PROMPT = "Stages 🌳"


def fused_ids(engine: Path, options: dict[str, object], max_tokens: int) -> tuple[int, ...]:
    """What the whole step gives in this process, alone."""
    scheduler = Scheduler.from_engine(engine, num_threads=1)
    prompt_ids = tuple(PreTrainedTokenizerFast.from_pretrained(engine / "tokenizer").encode(PROMPT))
    params = {{"return_log_probs": "returns_log_probs"}.get(name, name): value for name, value in options.items()}
    sampling = SamplingParams(max_tokens=max_tokens, end_ids=(), **params)
    scheduler.add(Request(request_id=1, prompt_ids=prompt_ids, sampling=sampling))
    ids: tuple[int, ...] = ()
    while scheduler.sequences:
        ids += scheduler.step()[0].token_ids
    return ids


def assert_same_texts(engine: Path, server: TritonServer) -> None:
    """In company, and one of them alone again."""
    with Client(server.grpc_url, deadline_s=90) as client:
        streams = [client.stream(PROMPT, max_tokens=40, end_id=-1, **options) for options in OPTIONS]
        answers: list[Generation] = []
        for stream in streams:
            list(stream)
            answers.append(stream.generation)
        alone = client.generate(PROMPT, max_tokens=40, end_id=-1, **OPTIONS[1])
    assert alone.token_ids == answers[1].token_ids
    for options, answer in zip(OPTIONS, answers, strict=True):
        assert answer.token_ids == fused_ids(engine, options, 40)
    assert len(answers[3].log_probs) == 40


def test_staged_answers_are_the_fused_ones_alone_and_in_company(
    tiny_engine: Callable[..., Path], tiny_staged_server: TritonServer
) -> None:
    assert_same_texts(tiny_engine("eagle3"), tiny_staged_server)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_staged_answers_are_the_fused_ones_with_the_other_heads(
    head: str, tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = tiny_engine(head)
    repository = write_repository(tmp_path / "repository", engine_dir=engine, layout=Layout.STAGED, max_batch_size=8)
    ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    with TritonServer(ServerConfig(repository=repository, log_file=tmp_path / "triton.log", **ports)) as server:
        assert_same_texts(engine, server)


def test_each_stage_has_statistics_of_its_own_and_the_step_is_one_call(tiny_staged_server: TritonServer) -> None:
    def calls() -> dict[str, float]:
        return scrape(tiny_staged_server.metrics_url).by("model", "nv_inference_request_success")

    with Client(tiny_staged_server.http_url, deadline_s=90) as client:
        before = calls()
        answer = client.generate(PROMPT, max_tokens=30, end_id=-1)
        after = calls()
    grown = {model: after[model] - before.get(model, 0.0) for model in after}
    assert grown["speculative_step"] == grown["acceptance"] == answer.stats.num_target_steps
    # One more each for the prompt.
    assert grown["tree_construction"] == grown["verification"] == answer.stats.num_target_steps + 1
