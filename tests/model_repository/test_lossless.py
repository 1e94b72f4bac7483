"""Every response says whether its text's law is the target's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from furcate.builder.acceptance_config import Acceptance
from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.engine_request import EngineDefaults
from furcate.model_repository.fused import Fused, Turn


@pytest.mark.parametrize(("acceptance", "is_lossless"), [(Acceptance.MATCH, True), (Acceptance.TYPICAL, False)])
def test_responses_name_a_lossy_rule(
    acceptance: Acceptance, is_lossless: bool, tiny_engine: Callable[..., Path]
) -> None:
    engine = tiny_engine("medusa", acceptance=acceptance)
    fused = Fused(
        Scheduler.from_engine(engine, num_threads=1),
        defaults=EngineDefaults(end_ids=(), vocab_size=300),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(engine / "tokenizer"),
        log_failure=lambda error: pytest.fail(repr(error)),
    )
    tensors = {
        "input_ids": np.array([[7, 8, 9]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[6]], np.int32),
        "streaming": np.array([[True]]),
        "temperature": np.array([[0.8]], np.float32),
        "seed": np.array([[3]], np.uint64),
    }
    turn, told = Turn(key=1, is_first=True, tensors=tensors), []
    while True:
        (reply,) = fused.run([turn])
        assert reply.error is None
        if reply.outputs is not None:
            told.append(reply.outputs["is_lossless"])
        if reply.is_last:
            break
        turn = Turn(key=1, is_first=False)
    assert len(told) > 1
    assert all(one.shape == (1, 1) and one.item() is is_lossless for one in told)
