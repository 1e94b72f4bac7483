"""The `postprocessing` model: tokens to text. Runs inside Triton's Python backend."""

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.errors import RequestError
from furcate.model_repository.detokenize import Texts
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_messages import error_response, response, tensors_of


class TritonPythonModel:
    """One instance; answers each request once."""

    def initialize(self, args):
        self._texts = Texts(served_engine(args).tokenizer())

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            return response(self._texts.outputs(tensors_of(request)))
        except RequestError as error:
            return error_response(str(error))
        except Exception as error:
            pb_utils.Logger.log_error(f"postprocessing failed: {error!r}")
            return error_response(
                f"Server fault: postprocessing failed ({type(error).__name__}); see the server's log."
            )
