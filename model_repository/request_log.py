"""How requests ended: counted, and written to the JSON log, without a word of what they said."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from furcate.decoding.line import BUSY, TIMED_OUT
from furcate.model_repository.fused import SERVER_FAULT, Reply
from furcate.model_repository.json_lines import JsonLines
from furcate.model_repository.supervision import SHUTTING_DOWN

CANCELLED = "The request was cancelled."
OUTCOMES = (
    *("end_id", "stop", "length", "cancelled"),
    *("refused", "busy", "timed_out", "failed", "shutting_down"),
)
_OUTCOMES_BY_BEGINNING = {
    CANCELLED: "cancelled",
    BUSY: "busy",
    TIMED_OUT: "timed_out",
    SERVER_FAULT: "failed",
    SHUTTING_DOWN: "shutting_down",
}
_LOGGED = (
    *("num_input_tokens", "num_target_steps", "total_draft_tokens", "total_accepted_draft_tokens"),
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "arrival_time_ns", "first_scheduled_time_ns"),
    *("first_token_time_ns", "last_token_time_ns"),
)
"""The outputs of a last response that are logged under their own names."""


def outcome_of(reply: Reply) -> str:
    """How the request of this last reply ended: one of OUTCOMES."""
    if reply.error is None:
        assert reply.outputs is not None
        return reply.outputs["finish_reason"].reshape(-1)[0].decode()
    for beginning, outcome in _OUTCOMES_BY_BEGINNING.items():
        if reply.error.startswith(beginning):
            return outcome
    return "refused"


class RequestLog:
    """Takes in every request's end. `counts` are those of each outcome so far."""

    def __init__(self, lines: JsonLines) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._lines = lines

    def ended(self, client_id: str, reply: Reply) -> None:
        """A request's last reply."""
        outcome = outcome_of(reply)
        self.counts[outcome] += 1
        facts = _facts(reply.outputs) if reply.outputs is not None else {}
        self._lines.write("request", request_id=client_id, outcome=outcome, **facts)


def _facts(outputs: Mapping[str, np.ndarray]) -> dict[str, int]:
    facts = {name: int(outputs[name].reshape(-1)[0]) for name in _LOGGED}
    facts["num_output_tokens"] = outputs["earlier_ids"].size + int(outputs["num_output_tokens"].reshape(-1)[0])
    return facts
