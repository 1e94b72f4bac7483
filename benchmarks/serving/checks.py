"""What must hold under load: every text is what plain decoding gives, and no page is left behind."""

import urllib.request
from pathlib import Path

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import TreeConfig, TreeKind
from furcate.client.server import TritonServer
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler
from serving.load import Outcome
from serving.requests import Ask, Fate, ServedPrompt


def plain_texts(engine_dir: Path, prompts: list[ServedPrompt], wanted: list[Ask]) -> dict[tuple, tuple[int, ...]]:
    """The tokens of every key among the asks by plain decoding, one token a step, one prompt at a time, nothing of Triton."""
    engine = read_engine(engine_dir)
    plain = Scheduler(TorchExecutor(engine), TreeConfig(kind=TreeKind.SINGLE, budget=1, name="single"))
    longest: dict[tuple, int] = {}
    for ask in wanted:
        if ask.fate is Fate.MALFORMED:
            continue
        longest[ask.key] = max(longest.get(ask.key, 0), ask.options["max_tokens"])
    texts: dict[tuple, tuple[int, ...]] = {}
    for key, max_tokens in longest.items():
        index, temperature, seed = key
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, end_ids=engine.manifest.eos_token_ids
        )
        plain.add(Request(request_id=0, prompt_ids=prompts[index].encoded.input_ids, sampling=sampling))
        tokens: tuple[int, ...] = ()
        while plain.sequences:
            tokens += plain.step()[0].token_ids
        texts[key] = tokens
    return texts


def faults_of(outcomes: list[Outcome], texts: dict[tuple, tuple[int, ...]]) -> list[str]:
    """One sentence for each request that did not end as it had to."""
    faults = []
    for outcome in outcomes:
        ask, got = outcome.ask, outcome.token_ids
        name = f"prompt {ask.prompt_index} {ask.options}"
        if outcome.failure is not None:
            faults.append(f"{name}: {outcome.failure}")
        elif ask.fate is Fate.MALFORMED:
            if outcome.refusal is None:
                faults.append(f"{name}: was not refused")
        elif outcome.refusal is not None:
            faults.append(f"{name}: refused: {outcome.refusal}")
        else:
            whole = texts[ask.key][: ask.options["max_tokens"]]
            wanted = whole if outcome.generation is not None else whole[: len(got)]
            if got != wanted:
                faults.append(f"{name}: tokens {got} instead of {wanted}")
    return faults


def gauges(server: TritonServer) -> dict[str, float]:
    """furcate's own metrics of the running server, those without further labels by name."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("furcate_")]
    return {line.split("{")[0].split(" ")[0]: float(line.split()[-1]) for line in lines}
