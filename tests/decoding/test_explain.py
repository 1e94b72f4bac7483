"""What `furcate explain` tells is what happened: probabilities, paths, reasons, and the same in every form."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from furcate.builder.acceptance_config import Acceptance
from furcate.builder.engine import read_engine
from furcate.builder.errors import ConfigError
from furcate.client.cli_engine import run_explain
from furcate.decoding.explain import ExplainConfig, explain, explanation_of
from furcate.decoding.explain_page import page_of
from furcate.decoding.explain_report import Explanation, Miss, Verdict
from furcate.decoding.explain_terminal import print_explanation

PROMPT = "a<b & c"
CASES = {
    "dynamic": ("eagle3", {"tree": "dynamic:24/3/4"}),
    "static": ("eagle", {"tree": "mc_sim_7b_63"}),
    "medusa": ("medusa", {"tree": "chain:3"}),
    "single": ("eagle3", {"tree": "single"}),
    "sampled": ("eagle3", {"tree": "dynamic:24/3/4", "temperature": 0.8}),
    "drawn": ("eagle", {"tree": "chain:4", "temperature": 1.0, "acceptance": Acceptance.TRAVERSAL}),
}


@pytest.fixture(scope="module")
def explained(tiny_engine) -> Callable[[str], Explanation]:
    """The explanation of each case, made once."""

    @cache
    def explained(name: str) -> Explanation:
        head, options = CASES[name]
        path = tiny_engine(head)
        return explanation_of(read_engine(path), ExplainConfig(engine=path, prompt=PROMPT, max_tokens=24, **options))

    return explained


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_told_as_it_happened(explained, name):
    explanation = explained(name)
    assert explanation.num_target_steps == len(explanation.steps) > 0
    emitted = 1 + sum(step.num_emitted for step in explanation.steps)
    assert explanation.tau == pytest.approx((emitted - 1) / len(explanation.steps))
    assert sum(explanation.misses.values()) == len(explanation.steps)
    for step in explanation.steps:
        path = {node.index for node in step.path}
        assert step.nodes[0].verdict is Verdict.ROOT
        for node in step.nodes[1:]:
            parent = step.nodes[node.parent]
            assert node.depth == parent.depth + 1
            assert 0 <= node.target_prob <= 1
            assert node.draft_prob is None or 0 <= node.draft_prob <= 1
            is_on_path = node.parent in path or node.parent == 0
            if node.index in path:
                assert is_on_path
            else:
                assert node.verdict is (Verdict.REJECTED if is_on_path else Verdict.LOST)
        if step.miss is not Miss.END:
            assert step.num_emitted == len(path) + 1
    assert explanation.steps[-1].miss is Miss.END
    if name == "single":
        assert explanation.acceptance_by_depth == ()


def test_target_probabilities_are_those_of_transformers(explained, tiny_engine, tiny_target):
    model = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    explanation = explained("dynamic")
    engine = read_engine(tiny_engine("eagle3"))
    from transformers import AutoTokenizer

    from furcate.decoding.prompts import encode

    tokenizer = AutoTokenizer.from_pretrained(engine.tokenizer_dir)
    context = encode(tokenizer, PROMPT, engine.manifest.has_chat_template)
    step = explanation.steps[0]
    for node in step.nodes[1:]:
        path, above = [], node
        while above.index > 0:
            above = step.nodes[above.parent]
            path.insert(0, above.token_id)
        with torch.inference_mode():
            law = model(torch.tensor([[*context, *path]])).logits[0, -1].softmax(-1)
        # Float32 rounding of six layers, through another attention.
        assert node.target_prob == pytest.approx(float(law[node.token_id]), rel=1e-2, abs=1e-5)


def test_the_reason_names_a_token_that_the_head_does_not_know(explained):
    """The head of 200 draft tokens misses a third of the vocabulary, and a random target often wants one of those."""
    explanation = explained("dynamic")
    assert explanation.misses[Miss.VOCABULARY.value] > 0
    step = next(step for step in explanation.steps if step.miss is Miss.VOCABULARY)
    assert "is not in the head's vocabulary" in step.why
    assert step.bonus in step.why


class Outline(HTMLParser):
    """The open elements, counts of all, and everything that would be fetched."""

    VOID = frozenset({"meta", "rect", "path"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_every_node(explained):
    explanation = explained("dynamic")
    page = page_of(explanation)
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.fetched == []
    assert outline.counts.get("script") is None
    assert "@import" not in page
    assert "url(" not in page
    assert outline.counts["g"] == sum(len(step.nodes) for step in explanation.steps)
    assert outline.counts["svg"] == len(explanation.steps)
    assert "a&lt;b &amp; c" in page


def test_boxes_of_the_page_do_not_overlap(explained):
    page = page_of(explained("static"))
    for svg in re.findall("<svg.*?</svg>", page, flags=re.DOTALL):
        width, height = (float(re.search(f'{name}="([0-9.]+)"', svg)[1]) for name in ("width", "height"))
        boxes = [
            tuple(map(float, box))
            for box in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
        ]
        assert all(x + w <= width and y + h <= height for x, y, w, h in boxes)
        for index, (x, y, _, h) in enumerate(boxes):
            assert all(x != other_x or abs(y - other_y) >= h for other_x, other_y, _, _ in boxes[index + 1 :])


def test_the_terminal_shows_paths_and_counts_what_it_hides(explained):
    explanation = explained("dynamic")
    texts = []
    for shows_everything in (False, True):
        stream = io.StringIO()
        console = Console(file=stream, width=200)
        print_explanation(explanation, shows_everything=shows_everything, console=console)
        texts.append(stream.getvalue())
    nodes = [node for step in explanation.steps for node in step.nodes]
    assert texts[1].count(" q ") == len(nodes) - len(explanation.steps)
    lost = [node for node in nodes if node.verdict is Verdict.LOST]
    assert texts[0].count(" q ") == len(nodes) - len(explanation.steps) - len(lost)
    assert sum(map(int, re.findall(r"and (\d+) below it", texts[0]))) == len(lost)
    assert f"{len(explanation.steps)} steps, tau {explanation.tau:.2f}" in texts[0]


def test_the_command_writes_page_and_json(tiny_engine, tmp_path, capsys):
    page, record = tmp_path / "steps.html", tmp_path / "steps.json"
    arguments = [str(tiny_engine("eagle3")), PROMPT, "--tree", "chain:3", "--max-tokens", "8", "--html", str(page)]
    run_explain([*arguments, "--json", str(record)])
    assert "tau" in capsys.readouterr().out
    written = json.loads(record.read_text())
    config = ExplainConfig(engine=tiny_engine("eagle3"), prompt=PROMPT, tree="chain:3", max_tokens=8, html=page)
    assert written == json.loads(json.dumps(asdict(explain(config))))
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory; name another file"):
        run_explain([*arguments[:-1], str(tmp_path / "nowhere/steps.html")])
