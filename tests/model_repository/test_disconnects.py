"""An answer's key finds the process that makes the answer."""

import os
import queue
import subprocess
import sys

from furcate.model_repository.disconnects import (
    NUM_RANDOM_BITS,
    AskedAnswers,
    DisconnectListener,
    new_answer_key,
    report_disconnect,
)


def test_keys_are_positive_name_this_process_and_differ() -> None:
    keys = {new_answer_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(0 < key < 2**63 and key >> NUM_RANDOM_BITS == os.getpid() for key in keys)


def test_another_process_reports_to_the_one_the_key_names() -> None:
    reported: queue.Queue[int] = queue.Queue()
    listener = DisconnectListener(reported.put)
    key = new_answer_key()
    code = f"from furcate.model_repository.disconnects import report_disconnect; report_disconnect({key})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert reported.get(timeout=30) == key
    listener.stop()
    report_disconnect(key)  # nobody listens any more, and that is nobody's fault
    assert reported.empty()


def test_each_answer_is_asked_for_now_and_then() -> None:
    asked = AskedAnswers()
    assert asked.is_due(1)
    assert asked.is_due(2)
    assert not asked.is_due(1)
