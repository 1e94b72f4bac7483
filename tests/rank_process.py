"""One rank of an engine that two processes share, on CPUs: `rank_process.py ENGINE PLANS TREE`, rank and port in the environment.

Rank 0 writes three requests' texts and prints them; the other follows. The plans are torch's (torch_runtime.py), their sums over
ranks gloo's; everything else is the executor's own.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch_runtime import TorchRuntime, record_of

from furcate.builder.engine import read_engine
from furcate.builder.tree_config import parse_tree
from furcate.decoding.executors.ranks import Operation, join_ranks
from furcate.decoding.executors.tensorrt import TensorRTExecutor
from furcate.decoding.request import Request, SamplingParams
from furcate.decoding.scheduler import Scheduler


def main() -> None:
    engine_dir, plans, tree = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    engine = read_engine(engine_dir)
    record = replace(record_of(engine.manifest), tp_size=2)
    engine = replace(engine, path=plans, manifest=replace(engine.manifest, tensorrt=record))
    ranks = join_ranks(2, on_gpu=False)
    runtime = TorchRuntime(engine, ranks)
    executor = TensorRTExecutor(engine, runtime, device="cpu", ranks=ranks)
    if ranks.rank > 0:
        executor.follow()
        print(json.dumps(runtime.plans["target"].num_passes))
        return
    scheduler = Scheduler(executor, parse_tree(tree, executor.head.kind if executor.head else None))
    generator = torch.Generator().manual_seed(7)
    for index, (length, max_tokens) in enumerate(((40, 17), (3, 9), (65, 12))):
        prompt = tuple(torch.randint(2, 258, (length,), generator=generator).tolist())
        scheduler.add(Request(request_id=index, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while scheduler.sequences:
        for output in scheduler.step():
            texts[output.request_id] += output.token_ids
    ranks.send(Operation.STOP, {})
    print(json.dumps([texts, runtime.plans["target"].num_passes]))


if __name__ == "__main__":
    main()
