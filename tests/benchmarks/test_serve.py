"""The load tools on a tiny engine and the real server: they run, and their checks can fail."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from furcate.model_repository.generate import write_repository

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch):
    """The modules behind the script."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from serving import checks, load, requests

    return checks, load, requests


@pytest.mark.server
def test_a_short_soak_with_cancels_and_malformed_requests_finds_no_fault(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = tiny_engine("eagle3")
    repository = write_repository(tmp_path / "repository", engine_dir=engine)
    shares = ("--cancelled", "0.2", "--malformed", "0.2")
    levels = ("--minutes", "0.1", "--warm-up-minutes", "0.05", "--levels", "2", "12", "--limit", "6")
    command = (sys.executable, BENCHMARKS / "serve.py", "soak", engine, repository, *levels, *shares)
    result = subprocess.run(
        [*map(str, command), "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS.parent,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "serve-soak.json").read_text())
    assert found["faults"] == []
    assert min(found["finished"], found["left_early"], found["refused"]) > 0
    assert found["finished"] + found["left_early"] + found["refused"] == found["requests"]
    assert found["gauges_after"]["furcate_pages_allocated"] == 0
    processes = {"tritonserver", "preprocessing", "tensorrt_llm", "postprocessing", "K/V pages"}
    assert found["memory_mib"]["last"].keys() == processes
    assert min(found["memory_mib"]["last"].values()) > 0
    assert (tmp_path / "serve-soak-memory.png").stat().st_size > 5000


def test_every_kind_of_fault_is_found(serving) -> None:
    checks, load, requests = serving
    ask = requests.Ask(prompt_index=0, text="a", options={"max_tokens": 3})
    texts = {ask.key: (5, 6, 7, 8)}
    left = replace(ask, fate=requests.Fate.CANCELLED)
    malformed = replace(ask, fate=requests.Fate.MALFORMED)

    def faults(ask, **came) -> list[str]:
        return checks.faults_of([load.Outcome(ask=ask, sent_s=0.0, **came)], texts)

    assert faults(ask, token_ids=(5, 6, 7), generation=object()) == []
    assert faults(left, token_ids=(5, 6)) == []
    assert faults(malformed, refusal="no") == []
    assert "instead of (5, 6, 7)" in faults(ask, token_ids=(5, 6), generation=object())[0]
    assert "instead of" in faults(ask, token_ids=(5, 9, 7), generation=object())[0]
    assert "instead of" in faults(left, token_ids=(6,))[0]
    assert "was not refused" in faults(malformed, generation=object())[0]
    assert "refused: no" in faults(ask, refusal="no")[0]
    assert "gone" in faults(ask, failure="gone")[0]


def test_the_same_seed_gives_the_same_requests_and_equal_keys_equal_texts(serving) -> None:
    _, _, requests = serving
    prompts = [requests.ServedPrompt(text=text, encoded=None, options={}) for text in "abc"]
    mix = requests.Mix(cancelled=0.3, malformed=0.3)
    one, two = (requests.asks(prompts, mix, seed=4) for _ in range(2))
    drawn = [next(one) for _ in range(200)]
    assert drawn == [next(two) for _ in range(200)]
    assert {ask.fate for ask in drawn} == set(requests.Fate)
    sound = [ask for ask in drawn if ask.fate is not requests.Fate.MALFORMED]
    assert all((ask.key[1] > 0) == (ask.key[2] is not None) for ask in sound)


def test_the_slope_of_a_line_is_found_and_of_noise_is_within_its_error(serving) -> None:
    from serving.memory import slope_of

    times = [float(t) for t in range(0, 600, 2)]
    slope, error = slope_of(times, [100 + t / 3600 for t in times])
    assert slope == pytest.approx(1.0)
    assert error == pytest.approx(0.0, abs=1e-6)
    noise = [100 + (7 * i * i % 13 - 6) for i in range(len(times))]
    slope, error = slope_of(times, noise)
    assert abs(slope) < 3 * error
