"""One answer of `tensorrt_llm` while it grows, and the tensors that tell of it."""

import time
from dataclasses import replace

import numpy as np

from furcate.decoding.request import FinishReason, Request, RequestStats, StepOutput
from furcate.model_repository.disconnects import new_answer_key
from furcate.model_repository.engine_request import EngineRequest
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

    def outputs(self) -> dict[str, np.ndarray] | None:
        """The tensors of a response in mid-stream; None when there is nothing to send yet."""
        if not self._asked.is_streaming or self._num_sent == len(self._ids):
            return None
        if time.monotonic() - self._responded_at < self._response_interval_s:
            return None
        return self._tensors("")

    def last_outputs(self, reason: FinishReason) -> dict[str, np.ndarray]:
        """The tensors of the answer's last response: what was not sent before, and why it ended."""
        return self._tensors(reason.value)

    def _tensors(self, finish_reason: str) -> dict[str, np.ndarray]:
        earlier, fresh = self._ids[: self._num_sent], self._ids[self._num_sent :]
        log_probs = self._log_probs[max(self._num_sent - self._num_prompt_ids, 0) :]
        self._num_sent = len(self._ids)
        self._responded_at = time.monotonic()
        has_log_probs = self.request.sampling.returns_log_probs
        return TENSORRT_LLM.outputs_from(
            {
                "output_ids": [fresh],
                "sequence_length": [len(fresh)],
                "cum_log_probs": [sum(self._log_probs)] if has_log_probs else [],
                "output_log_probs": [log_probs] if has_log_probs else np.zeros((1, 0)),
                "answer_key": [self.key],
                "earlier_ids": earlier,
                "num_unsearched_ids": [self._num_prompt_ids + self.request.sampling.min_tokens],
                "answer_stop_texts": [text.encode() for text in self._asked.stop_texts],
                "finish_reason": [finish_reason.encode()],
                **_no_logits(),
                **_counts(self._stats, num_fresh=len(fresh) - max(self._num_prompt_ids - len(earlier), 0)),
            }
        )


def outputs_of_cancel(*, was_found: bool) -> dict[str, np.ndarray]:
    """The tensors that answer a request to cancel: no tokens, and "cancelled", or "unknown" when none had that id."""
    return TENSORRT_LLM.outputs_from(
        {
            "output_ids": np.zeros((1, 0)),
            "sequence_length": [0],
            "cum_log_probs": [],
            "output_log_probs": np.zeros((1, 0)),
            "answer_key": [new_answer_key()],
            "earlier_ids": [],
            "num_unsearched_ids": [0],
            "answer_stop_texts": [],
            "finish_reason": [FinishReason.CANCELLED.value.encode() if was_found else b"unknown"],
            **_no_logits(),
            **_counts(RequestStats(num_prompt_tokens=0), num_fresh=0),
        }
    )


def _no_logits() -> dict[str, object]:
    return {"context_logits": np.zeros((0, 0)), "generation_logits": np.zeros((0, 0, 0))}


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
