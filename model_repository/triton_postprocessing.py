"""The `postprocessing` model: tokens to text. Runs inside Triton's Python backend."""

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.errors import RequestError
from furcate.model_repository.detokenize import Texts
from furcate.model_repository.disconnects import AskedAnswers, report_disconnect
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_messages import error_response, response, tensors_of


class TritonPythonModel:
    """One instance; answers each request once, or not at all where it only shows whether its client is still there."""

    def initialize(self, args):
        self._texts = Texts(served_engine(args).tokenizer())
        self._asked = AskedAnswers()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            answer = self._answer(request)
            if answer is not None:
                sender.send(answer)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request):
        try:
            tensors = tensors_of(request)
            self._report_if_unread(request, tensors)
            if self._texts.are_for_nobody(tensors):
                return None
            return response(self._texts.outputs(tensors), request.requested_output_names())
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
