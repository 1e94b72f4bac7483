"""How many CPU threads to run with, found out by trying.

More threads are faster only while every core is really there: on a shared or throttled machine one absent core holds up every
parallel loop of a pass, and two threads can be ten times slower than one.
"""

import os
import statistics
import time

import torch

from furcate.builder.network.inputs import PassInputs
from furcate.decoding.executors.executor import EngineExecutor

NUM_NODES = 16
NUM_TRIALS = 5


def settle_threads(executor: EngineExecutor, num_threads: int | None) -> int:
    """The number of threads torch uses from now on: `num_threads`; else OMP_NUM_THREADS; else the faster of all cores and one.

    Call it on an idle executor: the trial passes write to the first page of its pool.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif executor.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        candidates = sorted({1, torch.get_num_threads()}, reverse=True)
        if len(candidates) > 1:
            torch.set_num_threads(min(candidates, key=lambda count: _pass_seconds(executor, count)))
    return torch.get_num_threads()


@torch.inference_mode()
def _pass_seconds(executor: EngineExecutor, num_threads: int) -> float:
    """Median time of a small target pass."""
    torch.set_num_threads(num_threads)
    num_nodes = min(NUM_NODES, executor.manifest.page_size)
    inputs = PassInputs(
        token_ids=torch.zeros(1, num_nodes, dtype=torch.int64),
        positions=torch.arange(num_nodes, dtype=torch.int32)[None],
        tree_mask=None,
        cache_lengths=torch.zeros(1, dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
    )
    seconds = []
    for _ in range(NUM_TRIALS + 1):
        start = time.perf_counter()
        executor.target_pass(inputs)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
