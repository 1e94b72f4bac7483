"""What a generation tells."""

import numpy as np

from furcate.client.cli_generate import closing_line
from furcate.client.results import Generation, delta_from_outputs
from furcate.decoding.request import FinishReason, RequestStats

GENERATION = Generation(
    request_id="r",
    text="abc",
    token_ids=(1, 2, 3, 4, 5),
    finish_reason=FinishReason.STOP,
    stats=RequestStats(
        num_prompt_tokens=3,
        num_emitted_tokens=5,
        num_target_steps=2,
        num_draft_tokens=8,
        num_accepted_draft_tokens=2,
        arrival_time_ns=1_000_000_000,
        first_token_time_ns=1_250_000_000,
    ),
    duration_s=0.5,
)


def test_figures_follow_from_the_counts() -> None:
    assert GENERATION.tau == 2.0
    assert GENERATION.acceptance_rate == 0.25
    assert GENERATION.tokens_per_s == 10.0
    assert GENERATION.time_to_first_token_s == 0.25


def test_closing_line() -> None:
    assert closing_line(GENERATION) == "5 tokens in 0.50 s, 10.0 tokens/s, tau 2.00, finish reason: stop"


def test_delta_of_a_response() -> None:
    outputs = {
        "text_output": np.array([["é".encode()]], np.object_),
        "output_token_ids": np.array([[4, 5]], np.int32),
        "finish_reason": np.array([[b""]], np.object_),
        "output_log_probs": np.array([[[-0.5, -1.0]]], np.float32),
    }
    delta = delta_from_outputs(outputs)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("é", (4, 5), None)
    assert delta.log_probs == (-0.5, -1.0)
