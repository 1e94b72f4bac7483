"""Generates one text and records why each step's tree was accepted as far as it was: `furcate explain`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import Engine, read_engine
from furcate.builder.errors import ConfigError
from furcate.builder.merged_tree_config import parse_trees
from furcate.decoding.executors.load import load_executor
from furcate.decoding.explain_record import Recorder
from furcate.decoding.explain_report import Explanation, Miss
from furcate.decoding.prompts import encode
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """See the tree of every step: its tokens, draft and target probabilities, what was accepted, and why the rest fell.

    Prints it, and writes the same as one HTML page that needs nothing else.

    examples:
      furcate explain engines/smol "Why is the sky blue?"
      furcate explain engines/smol "1, 2, 3," --tree chain:5 --max-tokens 16 --html chain.html
      furcate explain engines/smol "Hello" --json steps.json
    """

    engine: tyro.conf.Positional[Path]
    """Engine directory."""
    prompt: tyro.conf.Positional[str]
    """The prompt; put in the target's chat template where it has one."""
    max_tokens: int = 32
    """Tokens to generate at most."""
    tree: str | None = None
    """Draft this tree instead of the engine's own (same words as build_engine --tree)."""
    acceptance: Acceptance | None = None
    """Decide by this rule instead of the engine's own."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Makes a sampled text repeatable."""
    html: Path = Path("explain.html")
    """The page to write."""
    json: Path | None = None
    """Also write everything here, for tools."""
    everything: bool = False
    """Print the nodes below fallen ones too; the page always shows them."""


def explain(config: ExplainConfig) -> Explanation:
    """Generates the text, prints its steps, writes the page, and returns all of it."""
    from furcate.decoding.explain_page import page_of
    from furcate.decoding.explain_terminal import print_explanation

    engine = read_engine(config.engine)
    explanation = explanation_of(engine, config)
    print_explanation(explanation, shows_everything=config.everything)
    _write(config.html, page_of(explanation))
    print(f"The same as a page: {config.html}")
    if config.json is not None:
        _write(config.json, json.dumps(asdict(explanation), indent=1) + "\n")
    return explanation


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file.") from error


@torch.inference_mode()
def explanation_of(engine: Engine, config: ExplainConfig) -> Explanation:
    """What every step of one text did. Raises RequestError when the prompt cannot be served."""
    from transformers import AutoTokenizer

    manifest = engine.manifest
    tree = manifest.tree if config.tree is None else parse_trees(config.tree, manifest.heads)
    tokenizer = AutoTokenizer.from_pretrained(engine.tokenizer_dir, trust_remote_code=False)
    scheduler = Scheduler(load_executor(engine), tree, config.acceptance)
    recorder = Recorder(scheduler, tokenizer)
    sampling = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        end_ids=manifest.eos_token_ids,
    )
    prompt_ids = tuple(encode(tokenizer, config.prompt, manifest.has_chat_template))
    scheduler.add(Request(request_id=0, prompt_ids=prompt_ids, sampling=sampling))
    token_ids: list[int] = []
    output = None
    while scheduler.sequences:
        (output,) = scheduler.step()
        token_ids += output.token_ids
        recorder.close_step(output)
    assert output is not None
    misses = [step.miss for step in recorder.steps]
    return Explanation(
        engine=manifest.name,
        tree=str(tree),
        acceptance=recorder.acceptance,
        prompt=config.prompt,
        text=tokenizer.decode(token_ids, skip_special_tokens=True),
        first_token=recorder.visible(token_ids[0]) if token_ids else "",
        finish_reason=output.finish_reason or "",
        error=output.error,
        num_target_steps=output.stats.num_target_steps,
        tau=output.stats.tau,
        acceptance_by_depth=recorder.acceptance_by_depth(),
        misses={kind.value: misses.count(kind) for kind in Miss if kind in misses},
        steps=tuple(recorder.steps),
    )
