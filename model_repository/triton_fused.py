"""The `tensorrt_llm` model of the `fused` layout: one execute() is one step. Runs inside Triton's Python backend."""

import threading
import time
import traceback
from pathlib import Path

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.decoding.scheduler import Scheduler
from furcate.model_repository.engine_request import EngineDefaults
from furcate.model_repository.fused import Fused, Turn
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_gauges import Gauges
from furcate.model_repository.triton_messages import error_response, parameters_of, response, tensors_of

CANCEL_PARAMETER = "cancel_id"
"""A request with this parameter ends the request that has this id, and generates nothing itself."""

SWEEP_S = 0.1
"""How often requests that get no more turns are looked for."""


class TritonPythonModel:
    """One instance holds one engine.

    Triton drops a request that is cancelled while it waits for its turn, without telling the model. So the response
    senders of the live requests are kept, and a thread asks those that had no turn lately whether they are cancelled.
    """

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
        self._turns = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="furcate-sweep", daemon=True)
        self._sweeper.start()

    def execute(self, requests):
        with self._lock:
            replies = self._fused.run([_turn(request) for request in requests])
            self._update_gauges()
            now = time.monotonic()
            for request, reply in zip(requests, replies, strict=True):
                sender = request.get_response_sender()
                if reply.is_last:
                    self._turns.pop(request.correlation_id(), None)
                else:
                    self._turns[request.correlation_id()] = (sender, now)
                _send(request, sender, reply)

    def finalize(self):
        self._ended.set()
        self._sweeper.join()

    def _sweep(self):
        while not self._ended.wait(SWEEP_S):
            with self._lock:
                before = time.monotonic() - SWEEP_S
                gone = [key for key, (sender, at) in self._turns.items() if at < before and sender.is_cancelled()]
                for key in gone:
                    del self._turns[key]
                    self._fused.drop(key)
                if gone:
                    self._update_gauges()

    def _update_gauges(self):
        self._gauges.update(
            allocated=self._scheduler.num_allocated_pages,
            committed=self._scheduler.num_committed_pages,
            total=self._scheduler.num_pages,
            live=self._fused.num_live,
        )


def _turn(request):
    start = pb_utils.get_input_tensor_by_name(request, "START")
    is_first = bool(start.as_numpy().reshape(-1)[0])
    key, client_id = request.correlation_id(), request.request_id()
    if not is_first:
        return Turn(key=key, is_first=False, client_id=client_id, is_cancelled=request.is_cancelled())
    tensors = tensors_of(request)
    return Turn(
        key=key,
        is_first=True,
        client_id=client_id,
        cancel_id=_cancel_id(request, tensors, client_id),
        is_cancelled=request.is_cancelled(),
        tensors=tensors,
    )


def _cancel_id(request, tensors, client_id):
    """The client id of the request to end: by parameter, or by the old contract's `stop` input and the same id."""
    named = parameters_of(request).get(CANCEL_PARAMETER)
    if named is not None:
        return str(named)
    return client_id if "stop" in tensors and bool(tensors["stop"].reshape(-1)[0]) else None


def _send(request, sender, reply):
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if reply.is_last else 0
    if reply.error is not None:
        sender.send(error_response(reply.error, is_cancelled=reply.is_cancelled), flags=final)
    elif reply.outputs is not None:
        sender.send(response(reply.outputs), flags=final)
    if not reply.is_last:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def _log_failure(error):
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
