"""The `tensorrt_llm` model of the `staged` layout: as fused's, but a step is a call of `speculative_step`."""

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.engine import read_engine
from furcate.decoding.staged_step import StagedScheduler
from furcate.model_repository import triton_fused
from furcate.model_repository.staged_tables import SPECULATIVE_STEP, STAGES

_TABLES = {table.name: table for table in (*STAGES, SPECULATIVE_STEP)}


class TritonPythonModel(triton_fused.TritonPythonModel):
    """One instance drives the stages of one engine."""

    def scheduler_of(self, engine):
        return StagedScheduler.of(read_engine(engine.path), StageCalls(), self.scheduling)


class StageCalls:
    """The stages as Triton models of this server."""

    def run(self, model_name, arrays, *, is_prompt):
        """One call; RuntimeError when the stage failed."""
        if is_prompt:
            arrays = {**arrays, "is_prompt": np.array([[True]])}
        request = pb_utils.InferenceRequest(
            model_name=model_name,
            requested_output_names=[field.name for field in _TABLES[model_name].outputs],
            inputs=[pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in arrays.items()],
        )
        answer = request.exec()
        if answer.has_error():
            raise RuntimeError(answer.error().message())
        return {tensor.name(): tensor.as_numpy().copy() for tensor in answer.output_tensors()}
