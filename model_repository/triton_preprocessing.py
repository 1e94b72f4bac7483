"""The `preprocessing` model: text to tokens. Runs inside Triton's Python backend."""

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from furcate.builder.errors import RequestError
from furcate.model_repository.prompt import Prompts
from furcate.model_repository.served_engine import served_engine
from furcate.model_repository.triton_messages import error_response, response, tensors_of


class TritonPythonModel:
    """One instance; answers each request once."""

    def initialize(self, args):
        engine = served_engine(args)
        self._prompts = Prompts(engine.tokenizer(), end_ids=engine.end_ids, vocab_size=engine.vocab_size)

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            return response(self._prompts.outputs(tensors_of(request)))
        except RequestError as error:
            return error_response(str(error))
        except Exception as error:
            pb_utils.Logger.log_error(f"preprocessing failed: {error!r}")
            return error_response(f"Server fault: preprocessing failed ({type(error).__name__}); see the server's log.")
