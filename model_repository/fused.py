"""The `fused` layout's model without Triton: one call of `run` is one step for every request in the batch.

Triton's iterative sequence batcher hands each live request in again and again until its last reply; this module keeps
what lives between two turns. A request that is not right, or that fails, ends alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from furcate.builder.errors import RequestError
from furcate.decoding.request import FinishReason, Request, StepOutput
from furcate.model_repository.answer import Answer, outputs_of_cancel
from furcate.model_repository.engine_request import (
    EngineDefaults,
    read_request,
    read_response_interval_s,
    read_urgency,
)
from furcate.model_repository.supervision import refusal_of_new_work
from furcate.model_repository.text_stream import Decodes

NUM_REMEMBERED_CANCELS = 4096
"""Cancels that came before their request: so many are remembered, the oldest goes first."""

PROBE_INTERVAL_S = 0.05
"""How long an answer may send nothing before a response that shows only whether its client is still there."""
MOST_PROBES_PER_S = 100

SERVER_FAULT = "Server fault:"
"""How the sentences begin that tell of the server's failure, not of the request's."""


class Steps(Protocol):
    """What this module needs of `furcate.decoding.scheduler.Scheduler`."""

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def step(self, request_ids: Sequence[int]) -> list[StepOutput]: ...


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request's turn in a batch. `tensors` is read on its first turn only."""

    key: int
    """The same on every turn of one request, and of no other live one."""
    is_first: bool
    client_id: str = ""
    """The id that the client gave the request; a cancel names it."""
    cancel_id: str | None = None
    """Set when this request asks to end the request with that client id."""
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)
    timeout_us: int = 0
    """Triton's own field of the request; 0 is none."""
    is_in_ensemble: bool = False
    """True where responses go to `postprocessing`, which sees whether the client is still there."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a turn gives: outputs or an error to send (or neither yet), and whether the request is over."""

    outputs: dict[str, np.ndarray] | None = None
    error: str | None = None
    is_last: bool = False


class Fused:
    """The live requests of one engine."""

    def __init__(
        self,
        scheduler: Steps,
        *,
        defaults: EngineDefaults,
        tokenizer: Decodes,
        log_failure: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._log_failure = log_failure
        self._answers: dict[int, Answer] = {}
        self._early_cancels: OrderedDict[str, None] = OrderedDict()
        self._next_request_id = 0

    @property
    def num_live(self) -> int:
        """Requests between their first and last turn."""
        return len(self._answers)

    def run(self, turns: Sequence[Turn]) -> list[Reply]:
        """One reply for each turn, in order; all that do not end before it take part in one step."""
        replies: list[Reply | None] = [self._reply_before_step(turn) for turn in turns]
        waiting = [index for index, reply in enumerate(replies) if reply is None]
        for index, reply in zip(waiting, self._step([turns[index].key for index in waiting]), strict=True):
            replies[index] = reply
        return [reply for reply in replies if reply is not None]

    def drop(self, key: int) -> None:
        """Ends a request whose client is gone, and gives its pages back."""
        if key in self._answers:
            self._end(key)

    def cancel(self, key: int) -> None:
        """Ends a request; its pages are back now, and its next turn is its last."""
        answer = self._answers.get(key)
        if answer is not None and not answer.is_cancelled:
            self._mark_cancelled(answer)

    def cancel_answer(self, answer_key: int) -> None:
        """The same for the request whose responses bear this key."""
        for key, answer in self._answers.items():
            if answer.key == answer_key:
                self.cancel(key)

    def _reply_before_step(self, turn: Turn) -> Reply | None:
        """The reply of a turn that takes no part in the step, else None."""
        if turn.cancel_id is not None:
            return self._cancel(turn)
        if turn.is_first:
            error = refusal_of_new_work() or self._start(turn)
            if error is not None:
                return Reply(error=error, is_last=True)
        answer = self._answers.get(turn.key)
        if answer is None:
            return Reply(error="This request is not known here (any more); send it again.", is_last=True)
        if answer.is_cancelled:
            del self._answers[turn.key]
            return Reply(outputs=answer.last_outputs(FinishReason.CANCELLED), is_last=True)
        return None

    def _start(self, turn: Turn) -> str | None:
        """Takes a request in; the sentence to refuse it with, or None."""
        if turn.key in self._answers:
            return f"Sequence {turn.key} is running already; leave the sequence id out, one is given to each request."
        self._next_request_id += 1
        try:
            asked = read_request(turn.tensors, self._defaults)
            urgency = read_urgency(turn.parameters, turn.timeout_us)
            interval_s = read_response_interval_s(turn.parameters)
            request = Request(
                request_id=self._next_request_id,
                prompt_ids=asked.prompt_ids,
                sampling=asked.sampling,
                priority=urgency.priority,
                timeout_s=urgency.timeout_s,
            )
            self._scheduler.add(request)
        except RequestError as error:
            return str(error)
        except Exception as error:
            self._log_failure(error)
            return _failure(error)
        answer = Answer(
            request=request,
            asked=asked,
            client_id=turn.client_id,
            tokenizer=self._tokenizer,
            response_interval_s=interval_s,
            is_probed=turn.is_in_ensemble,
        )
        self._answers[turn.key] = answer
        if turn.client_id and self._early_cancels.pop(turn.client_id, "none") is None:
            self._mark_cancelled(answer)
        return None

    def _cancel(self, turn: Turn) -> Reply:
        """Ends the requests with that client id (their pages are back now), and says so."""
        # An empty id only asks whether the model lives: it must not end the requests that have none.
        named = turn.cancel_id or None
        found = [answer for answer in self._answers.values() if answer.client_id == named]
        for answer in found:
            self._mark_cancelled(answer)
        if not found and turn.cancel_id:
            self._early_cancels[turn.cancel_id] = None
            while len(self._early_cancels) > NUM_REMEMBERED_CANCELS:
                self._early_cancels.popitem(last=False)
        return Reply(outputs=outputs_of_cancel(was_found=bool(found)), is_last=True)

    def _mark_cancelled(self, answer: Answer) -> None:
        answer.is_cancelled = True
        self._scheduler.cancel(answer.request.request_id)

    def _end(self, key: int) -> None:
        self._scheduler.cancel(self._answers.pop(key).request.request_id)

    def _step(self, keys: list[int]) -> Iterable[Reply]:
        if not keys:
            return []
        ids = [self._answers[key].request.request_id for key in keys]
        try:
            outputs = {output.request_id: output for output in self._scheduler.step(ids)}
            return [self._reply_of(key, outputs[request_id]) for key, request_id in zip(keys, ids, strict=True)]
        except Exception as error:
            self._log_failure(error)
            for key in keys:
                if key in self._answers:
                    self._end(key)
            return [Reply(error=_failure(error), is_last=True) for _ in keys]

    def _reply_of(self, key: int, output: StepOutput) -> Reply:
        if output.error is not None:
            self._end(key)
            return Reply(error=output.error, is_last=True)
        answer = self._answers[key]
        reason = answer.take(output)
        if reason is not None:
            self._end(key)
            return Reply(outputs=answer.last_outputs(reason), is_last=True)
        return Reply(outputs=answer.outputs(max(PROBE_INTERVAL_S, len(self._answers) / MOST_PROBES_PER_S)))


def _failure(error: BaseException) -> str:
    return f"{SERVER_FAULT} a step failed ({type(error).__name__}) and its requests were ended; see the server's log."
