"""The `tensorrt_llm` model of the `fused` layout: one execute() is one step. Runs inside Triton's Python backend."""

import threading
import traceback
from pathlib import Path

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.engine_request import EngineDefaults
from furcate.model_repository.fused import Fused, Reply, Turn
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_cancels import Cancels
from furcate.model_repository.triton_gauges import Gauges
from furcate.model_repository.triton_messages import error_response, parameters_of, response, tensors_of

CANCEL_PARAMETER = "cancel_id"
"""A request with this parameter ends the request that has this id, and generates nothing itself."""


class TritonPythonModel:
    """One instance holds one engine."""

    def initialize(self, args):
        engine = served_engine(args)
        self._scheduler = Scheduler.from_engine(Path(engine.path))
        self._fused = Fused(
            self._scheduler,
            defaults=EngineDefaults(end_ids=engine.end_ids, vocab_size=engine.vocab_size),
            tokenizer=engine.tokenizer(),
            log_failure=_log_failure,
        )
        self._gauges = Gauges(engine.name)
        self._update_gauges()
        self._lock = threading.Lock()
        self._cancels = Cancels(on_abandoned=self._drop)

    def execute(self, requests):
        with self._lock:
            for request in requests:
                self._cancels.watch(request.correlation_id(), request.get_response_sender())
            replies = self._fused.run([_turn(request) for request in requests])
            replies = [self._unless_cancelled(*pair) for pair in zip(requests, replies, strict=True)]
            self._update_gauges()
            for request, reply in zip(requests, replies, strict=True):
                self._cancels.rest(request.correlation_id(), is_last=reply.is_last)
                _send(request, reply)

    def finalize(self):
        self._cancels.stop()

    def _unless_cancelled(self, request, reply):
        """The reply, or the end of a request whose client is gone: said now, because Triton would drop it unsaid."""
        key = request.correlation_id()
        if reply.is_last or not self._cancels.is_cancelled(key):
            return reply
        self._fused.drop(key)
        return Reply(error="The request was cancelled.", is_last=True)

    def _drop(self, key):
        with self._lock:
            self._fused.drop(key)
            self._update_gauges()

    def _update_gauges(self):
        self._gauges.update(
            allocated=self._scheduler.num_allocated_pages,
            committed=self._scheduler.num_committed_pages,
            total=self._scheduler.num_pages,
            live=self._fused.num_live,
        )


def _turn(request):
    key = request.correlation_id()
    start = pb_utils.get_input_tensor_by_name(request, "START")
    if not start.as_numpy().reshape(-1)[0]:
        return Turn(key=key, is_first=False)
    tensors, client_id = tensors_of(request), request.request_id()
    cancel_id = _cancel_id(request, tensors, client_id)
    return Turn(key=key, is_first=True, client_id=client_id, cancel_id=cancel_id, tensors=tensors)


def _cancel_id(request, tensors, client_id):
    """The client id of the request to end: by parameter, or by the old contract's `stop` input and the same id."""
    named = parameters_of(request).get(CANCEL_PARAMETER)
    if named is not None:
        return str(named)
    return client_id if "stop" in tensors and bool(tensors["stop"].reshape(-1)[0]) else None


def _send(request, reply):
    sender = request.get_response_sender()
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if reply.is_last else 0
    if reply.error is not None:
        sender.send(error_response(reply.error), flags=final)
    elif reply.outputs is not None:
        sender.send(response(reply.outputs), flags=final)
    if not reply.is_last:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def _log_failure(error):
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
