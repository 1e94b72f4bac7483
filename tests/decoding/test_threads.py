"""How the number of CPU threads is settled."""

import pytest
import torch

from furcate.builder.engine import read_engine
from furcate.decoding import threads
from furcate.decoding.executors.torch import TorchExecutor
from furcate.decoding.threads import settle_threads


@pytest.fixture
def executor(tiny_engine):
    before = torch.get_num_threads()
    yield TorchExecutor(read_engine(tiny_engine("eagle3")))
    torch.set_num_threads(before)


def test_a_number_that_is_given_is_used(executor):
    assert settle_threads(executor, 2) == torch.get_num_threads() == 2


def test_the_environment_is_respected(executor, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert settle_threads(executor, None) == 2


@pytest.mark.parametrize("slow", [1, 2])
def test_the_faster_of_all_cores_and_one_is_kept(executor, monkeypatch, slow):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_pass_seconds", lambda _, count: 9.0 if count == slow else 1.0)
    assert settle_threads(executor, None) == torch.get_num_threads() == 3 - slow


def test_the_trial_passes_run(executor):
    assert threads._pass_seconds(executor, 1) > 0
    assert torch.get_num_threads() == 1
