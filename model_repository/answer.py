"""One answer of `tensorrt_llm` while it grows, and the tensors that tell of it."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from furcate.decoding.request import FinishReason, Request, RequestStats, StepOutput
from furcate.model_repository.disconnects import new_answer_key
from furcate.model_repository.engine_request import EngineRequest
from furcate.model_repository.sampling_table import result_values
from furcate.model_repository.tables import TENSORRT_LLM
from furcate.model_repository.text_stream import AnswerText, Decodes


class Answer:
    """A live request's tokens so far.

    Stop texts are looked for here too, because only here can the generation end; the tokens go out up to the one that
    completed the stop text, and `postprocessing` cuts the text.
    """

    def __init__(
        self,
        *,
        request: Request,
        asked: EngineRequest,
        client_id: str,
        tokenizer: Decodes,
        response_interval_s: float = 0.0,
        is_probed: bool = False,
    ) -> None:
        self.request = request
        self.client_id = client_id
        self.is_cancelled = False
        self._asked = asked
        self.key = new_answer_key()
        """`postprocessing` keeps texts under it, and names the answer with it that nobody reads any more."""
        self._ids: list[int] = list(request.prompt_ids) if asked.includes_prompt else []
        self._num_prompt_ids = len(self._ids)
        self._num_sent = 0
        self._response_interval_s = response_interval_s
        self._responded_at = time.monotonic()
        self._is_probed = is_probed
        self._probed_at = self._responded_at
        self._log_probs: list[float] = []
        min_tokens = request.sampling.min_tokens
        has_stops = bool(asked.stop_texts)
        self._text = AnswerText(tokenizer, stops=asked.stop_texts, num_unsearched_ids=min_tokens) if has_stops else None
        self._stats = RequestStats(num_prompt_tokens=len(request.prompt_ids))

    def take(self, output: StepOutput) -> FinishReason | None:
        """Takes a step's tokens in; the reason when the answer is complete."""
        reason = output.finish_reason
        token_ids = output.token_ids
        if self._text is not None:
            for count, token_id in enumerate(token_ids, start=1):
                self._text.push(token_id)
                if self._text.is_stopped:
                    token_ids, reason = token_ids[:count], FinishReason.STOP
                    break
        self._ids += token_ids
        self._log_probs += output.log_probs[: len(token_ids)]
        self._stats = replace(output.stats, num_emitted_tokens=len(self._ids) - self._num_prompt_ids)
        return reason

    def outputs(self, probe_interval_s: float) -> dict[str, np.ndarray] | None:
        """The tensors of a response in mid-stream; None when there is nothing to send yet.

        An answer that is probed sends an empty response when none has gone out for so long: on it `postprocessing` sees whether
        the client is still there, and gives it nothing.
        """
        now = time.monotonic()
        has_more = self._asked.is_streaming and self._num_sent < len(self._ids)
        if has_more and now - self._responded_at >= self._response_interval_s:
            return self._tensors("")
        if self._is_probed and now - max(self._responded_at, self._probed_at) >= probe_interval_s:
            self._probed_at = now
            return _outputs_without_tokens({"answer_key": [self.key], "answer_results": [b""]})
        return None

    def last_outputs(self, reason: FinishReason) -> dict[str, np.ndarray]:
        """The tensors of the answer's last response: what was not sent before, and why it ended."""
        return self._tensors(reason.value)

    def _tensors(self, finish_reason: str) -> dict[str, np.ndarray]:
        earlier, fresh = self._ids[: self._num_sent], self._ids[self._num_sent :]
        log_probs = self._log_probs[max(self._num_sent - self._num_prompt_ids, 0) :]
        self._num_sent = len(self._ids)
        self._responded_at = time.monotonic()
        has_log_probs = self.request.sampling.returns_log_probs
        results = {
            "cum_log_probs": [sum(self._log_probs)] if has_log_probs else [],
            "output_log_probs": [log_probs if has_log_probs else []],
            **_counts(self._stats, num_fresh=len(fresh) - max(self._num_prompt_ids - len(earlier), 0)),
        }
        return TENSORRT_LLM.outputs_from(
            {
                "output_ids": [fresh],
                "sequence_length": [len(fresh)],
                "answer_key": [self.key],
                "earlier_ids": earlier,
                "num_unsearched_ids": [self._num_prompt_ids + self.request.sampling.min_tokens],
                "answer_stop_texts": [text.encode() for text in self._asked.stop_texts],
                "answer_results": [json.dumps(results).encode()],
                **result_values({**results, "finish_reason": [finish_reason.encode()]}),
            }
        )


def outputs_of_cancel(*, was_found: bool) -> dict[str, np.ndarray]:
    """The tensors that answer a request to cancel: no tokens, and "cancelled", or "unknown" when none had that id."""
    reason = FinishReason.CANCELLED.value if was_found else "unknown"
    return _outputs_without_tokens(
        {"answer_key": [new_answer_key()], "answer_results": [b"{}"], "finish_reason": [reason.encode()]}
    )


def _outputs_without_tokens(values: Mapping[str, object]) -> dict[str, np.ndarray]:
    nothing = {
        "output_ids": np.zeros((1, 0)),
        "sequence_length": [0],
        "earlier_ids": [],
        "num_unsearched_ids": [0],
        "answer_stop_texts": [],
    }
    return TENSORRT_LLM.outputs_from({**nothing, **result_values({}), **values})


def _counts(stats: RequestStats, *, num_fresh: int) -> dict[str, object]:
    """`num_fresh` generated tokens go out in this response; clients of the old contract add them up."""
    return {
        "batch_index": [0],
        "sequence_index": [0],
        "kv_cache_alloc_new_blocks": [stats.num_allocated_pages],
        "kv_cache_reused_blocks": [stats.num_reused_pages],
        "kv_cache_alloc_total_blocks": [stats.num_allocated_pages + stats.num_reused_pages],
        "total_accepted_draft_tokens": [stats.num_accepted_draft_tokens],
        "total_draft_tokens": [stats.num_draft_tokens],
        "num_input_tokens": [stats.num_prompt_tokens],
        "num_output_tokens": [num_fresh],
        "num_target_steps": [stats.num_target_steps],
        "is_lossless": [stats.is_lossless],
        "arrival_time_ns": [stats.arrival_time_ns],
        "first_scheduled_time_ns": [stats.first_scheduled_time_ns or 0],
        "first_token_time_ns": [stats.first_token_time_ns or 0],
        "last_token_time_ns": [stats.last_token_time_ns or 0],
        "acceptance_rate": [stats.acceptance_rate],
    }
