"""The `postprocessing` model: tokens to text. Runs inside Triton's Python backend."""

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.errors import RequestError
from furcate.model_repository.detokenize import Texts
from furcate.model_repository.disconnects import AskedAnswers, report_disconnect
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_messages import error_response, response, tensors_of


class TritonPythonModel:
    """One instance; answers each request once."""

    def initialize(self, args):
        self._texts = Texts(served_engine(args).tokenizer())
        self._asked = AskedAnswers()

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            tensors = tensors_of(request)
            self._report_if_unread(request, tensors)
            return response(self._texts.outputs(tensors))
        except RequestError as error:
            return error_response(str(error))
        except Exception as error:
            pb_utils.Logger.log_error(f"postprocessing failed: {error!r}")
            return error_response(
                f"Server fault: postprocessing failed ({type(error).__name__}); see the server's log."
            )

    def _report_if_unread(self, request, tensors):
        """Ends the answer in the model that makes it when the ensemble's client is gone."""
        if "ANSWER_KEY" not in tensors:
            return
        key = int(tensors["ANSWER_KEY"].reshape(-1)[0])
        if self._asked.is_due(key) and request.is_cancelled():
            report_disconnect(key)
