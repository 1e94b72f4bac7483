"""The `tensorrt_llm` model of the `fused` layout: one execute() is one step. Runs inside Triton's Python backend."""

import threading
import traceback
from pathlib import Path

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.decoding.executors.pool_memory import take_pool_memory
from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.disconnects import DisconnectListener
from furcate.model_repository.engine_request import EngineDefaults
from furcate.model_repository.fused import Fused, Reply, Turn
from furcate.model_repository.json_lines import JsonLines
from furcate.model_repository.request_log import CANCELLED, RequestLog
from furcate.model_repository.scheduling_parameters import served_scheduling
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.step_metrics import ObservedSteps
from furcate.model_repository.supervision import json_log_path
from furcate.model_repository.triton_cancels import Cancels
from furcate.model_repository.triton_messages import error_response, parameters_of, response, tensors_of
from furcate.model_repository.triton_metrics import Metrics

CANCEL_PARAMETER = "cancel_id"
"""A request with this parameter ends the request that has this id, and generates nothing itself."""

_FOR_CALLERS = ("num_output_tokens", "acceptance_rate")
"""Outputs that the ensemble does not ask for: it has them in answer_results."""


class TritonPythonModel:
    """One instance holds one engine."""

    def initialize(self, args):
        engine = served_engine(args)
        self.scheduling = served_scheduling(args)
        self._scheduler = self.scheduler_of(engine)
        self._steps = ObservedSteps(self._scheduler, max_depth=self._scheduler.manifest.tree.max_depth)
        self._fused = Fused(
            self._steps,
            defaults=EngineDefaults(end_ids=engine.end_ids, vocab_size=engine.vocab_size),
            tokenizer=engine.tokenizer(),
            log_failure=_log_failure,
        )
        self._lock = threading.Lock()
        self._log = RequestLog(JsonLines(json_log_path()))
        self._metrics = Metrics(engine.name, lock=self._lock, counters=self._counters)
        self._metrics.set_gauges(self._steps.gauges())
        self._cancels = Cancels(on_cancelled=self._cancel, on_abandoned=self._drop)
        self._disconnects = DisconnectListener(self._cancel_answer)

    def scheduler_of(self, engine):
        """What runs the steps."""
        scheduler = Scheduler.from_engine(Path(engine.path), scheduling=self.scheduling)
        executor = scheduler.executor
        take_pool_memory(executor.target_pool, *(drafter.head_pool for drafter in executor.drafters))
        return scheduler

    def execute(self, requests):
        with self._lock:
            for request in requests:
                self._cancels.watch(request.correlation_id(), request.get_response_sender())
            turns = [_turn(request) for request in requests]
            replies = [self._unless_cancelled(*pair) for pair in zip(turns, self._fused.run(turns), strict=True)]
            self._metrics.set_gauges(self._steps.gauges())
            for request, turn, reply in zip(requests, turns, replies, strict=True):
                self._cancels.rest(turn.key, is_last=reply.is_last)
                if reply.is_last and turn.cancel_id is None:
                    self._log.ended(request.request_id(), reply)
                _send(request, reply)

    def finalize(self):
        self._disconnects.stop()
        self._cancels.stop()
        self._metrics.stop()

    def _unless_cancelled(self, turn, reply):
        """The reply, or the end of a request whose client is gone: said now, because Triton would drop it unsaid."""
        if reply.is_last or not self._cancels.is_cancelled(turn.key):
            return reply
        self._fused.drop(turn.key)
        return Reply(error=CANCELLED, is_last=True)

    def _cancel_answer(self, answer_key):
        """Ends an answer that nobody reads; its next turn says so."""
        with self._lock:
            self._fused.cancel_answer(answer_key)
            self._metrics.set_gauges(self._steps.gauges())

    def _cancel(self, key):
        """Ends a request whose client is gone; its next turn, if it gets one, is its last."""
        with self._lock:
            self._fused.cancel(key)
            self._metrics.set_gauges(self._steps.gauges())

    def _drop(self, key):
        with self._lock:
            self._fused.drop(key)
            self._log.ended("", Reply(error=CANCELLED, is_last=True))
            self._metrics.set_gauges(self._steps.gauges())

    def _counters(self):
        return self._steps.counters(self._scheduler.executor.clock.seconds, self._log.counts)


def _turn(request):
    key = request.correlation_id()
    start = pb_utils.get_input_tensor_by_name(request, "START")
    if not start.as_numpy().reshape(-1)[0]:
        return Turn(key=key, is_first=False)
    tensors, client_id, parameters = tensors_of(request), request.request_id(), parameters_of(request)
    return Turn(
        key=key,
        is_first=True,
        client_id=client_id,
        cancel_id=_cancel_id(parameters, tensors, client_id),
        tensors=tensors,
        parameters=parameters,
        timeout_us=request.timeout(),
        is_in_ensemble=not set(_FOR_CALLERS) & set(request.requested_output_names()),
    )


def _cancel_id(parameters, tensors, client_id):
    """The client id of the request to end: by parameter, or by the old contract's `stop` input and the same id."""
    named = parameters.get(CANCEL_PARAMETER)
    if named is not None:
        return str(named)
    return client_id if "stop" in tensors and bool(tensors["stop"].reshape(-1)[0]) else None


def _send(request, reply):
    sender = request.get_response_sender()
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if reply.is_last else 0
    if reply.error is not None:
        sender.send(error_response(reply.error), flags=final)
    elif reply.outputs is not None:
        sender.send(response(reply.outputs, request.requested_output_names()), flags=final)
    if not reply.is_last:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def _log_failure(error):
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
