"""How requests end: what is counted and logged of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from furcate.decoding.request import FinishReason
from furcate.model_repository.answer import outputs_of_cancel
from furcate.model_repository.fused import Reply
from furcate.model_repository.json_lines import JsonLines
from furcate.model_repository.request_log import CANCELLED, OUTCOMES, RequestLog, outcome_of
from furcate.model_repository.supervision import DRAIN_FILE, SHUTTING_DOWN, refusal_of_new_work


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("temperature is -1; it must be 0 or more.", "refused"),
        ("Server busy: 3 requests wait already.", "busy"),
        ("Timed out: the request's 3 s were over.", "timed_out"),
        ("Server fault: a step failed.", "failed"),
        (SHUTTING_DOWN, "shutting_down"),
        (CANCELLED, "cancelled"),
    ],
)
def test_an_error_s_beginning_tells_how_the_request_ended(error: str, outcome: str) -> None:
    assert outcome_of(Reply(error=error, is_last=True)) == outcome


def test_every_finish_reason_is_an_outcome() -> None:
    assert {reason.value for reason in FinishReason} <= set(OUTCOMES)


def test_ends_are_counted_and_logged_without_words(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "log.jsonl")
    log = RequestLog(lines)
    log.ended("a", Reply(error="'guide' cannot be followed: my secret schema", is_last=True))
    outputs = outputs_of_cancel(was_found=True) | {"num_output_tokens": np.array([[3]], np.int32)}
    log.ended("b", Reply(outputs={**outputs, "earlier_ids": np.array([[5, 6]], np.int32)}, is_last=True))
    lines.close()
    first, second = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert {key: first[key] for key in ("event", "request_id", "outcome")} == {
        "event": "request",
        "request_id": "a",
        "outcome": "refused",
    }
    assert (second["outcome"], second["num_output_tokens"]) == ("cancelled", 5)
    assert "secret" not in (tmp_path / "log.jsonl").read_text()
    assert (log.counts["refused"], log.counts["cancelled"], log.counts["length"]) == (1, 1, 0)


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = JsonLines(None)
    lines.write("request", outcome="length")
    lines.close()
    assert list(tmp_path.iterdir()) == []


def test_new_work_is_refused_once_the_drain_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of_new_work() is None
    monkeypatch.setenv(DRAIN_FILE, str(tmp_path / "draining"))
    assert refusal_of_new_work() is None
    (tmp_path / "draining").touch()
    assert refusal_of_new_work() == SHUTTING_DOWN
