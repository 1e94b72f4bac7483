"""The models `tree_construction`, `verification` and `acceptance` of the `staged` layout. Run inside Triton's Python backend."""

import traceback

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.engine import read_engine
from furcate.decoding.executors.load import load_executor
from furcate.decoding.stages import TreeConstruction, Verification, accept
from furcate.decoding.threads import settle_threads
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_messages import error_response, response, tensors_of


class StageModel:
    """One instance; a request is a whole batch of sequences."""

    def initialize(self, args):
        self.load(read_engine(served_engine(args).path))

    def load(self, engine):
        """Gets ready to `run` (and `run_prompt`) stages of this engine."""
        raise NotImplementedError

    def run(self, arrays):
        """The stage's outputs."""
        raise NotImplementedError

    def run_prompt(self, arrays):
        """The same for a prompt's chunk."""
        raise NotImplementedError

    def execute(self, requests):
        return [self._answer(tensors_of(request)) for request in requests]

    def _answer(self, arrays):
        try:
            is_prompt = arrays.pop("is_prompt", None)
            return response(self.run(arrays) if is_prompt is None or not is_prompt.any() else self.run_prompt(arrays))
        except Exception as error:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
            return error_response(f"a stage failed ({type(error).__name__}); see the server's log")


class TreeConstructionModel(StageModel):
    """Holds the drafter."""

    def load(self, engine):
        executor = load_executor(engine)
        settle_threads(executor, None)
        stage = TreeConstruction(executor, engine.manifest.tree)
        self.run, self.run_prompt = stage.run, stage.run_prompt


class VerificationModel(StageModel):
    """Holds the target and its cache."""

    def load(self, engine):
        executor = load_executor(engine)
        settle_threads(executor, None)
        stage = Verification(executor, engine.manifest.tree)
        self.run, self.run_prompt = stage.run, stage.run_prompt


class AcceptanceModel(StageModel):
    """Holds nothing."""

    def load(self, engine):
        self._max_depth = engine.manifest.tree.max_depth

    def run(self, arrays):
        return accept(arrays, self._max_depth)
