"""The models `tree_construction`, `verification` and `acceptance` of the `staged` layout. Run inside Triton's Python backend."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.engine import read_engine
from furcate.decoding.executors.load import load_executor
from furcate.decoding.executors.pool_memory import take_pool_memory
from furcate.decoding.stages import TreeConstruction, Verification, accept
from furcate.decoding.threads import settle_threads
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_messages import error_response, response, tensors_of


class StageModel(ABC):
    """One instance; a request is a whole batch of sequences."""

    def initialize(self, args):
        self._run, self._run_prompt = self.stage_of(read_engine(served_engine(args).path))

    @abstractmethod
    def stage_of(self, engine) -> tuple[Callable, Callable]:
        """Two functions, from a request's arrays to the stage's outputs: of a step, and of a prompt's chunk."""

    def execute(self, requests):
        return [self._answer(tensors_of(request)) for request in requests]

    def _answer(self, arrays):
        try:
            is_prompt = arrays.pop("is_prompt", None)
            run = self._run if is_prompt is None or not is_prompt.any() else self._run_prompt
            return response(run(arrays))
        except Exception as error:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
            return error_response(f"a stage failed ({type(error).__name__}); see the server's log")


def _loaded(engine):
    """An executor of a stage's own."""
    executor = load_executor(engine)
    settle_threads(executor, None)
    return executor


class TreeConstructionModel(StageModel):
    """Holds the drafter."""

    def stage_of(self, engine):
        executor = _loaded(engine)
        take_pool_memory(executor.head_pool)
        stage = TreeConstruction(executor, engine.manifest.tree)
        return stage.run, stage.run_prompt


class VerificationModel(StageModel):
    """Holds the target and its cache."""

    def stage_of(self, engine):
        executor = _loaded(engine)
        take_pool_memory(executor.target_pool)
        stage = Verification(executor, engine.manifest.tree)
        return stage.run, stage.run_prompt


class AcceptanceModel(StageModel):
    """Holds nothing. A prompt's chunk never comes here."""

    def stage_of(self, engine):
        run = partial(accept, max_depth=engine.manifest.tree.max_depth)
        return run, run
