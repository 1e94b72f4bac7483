"""Tokens to text: what `postprocessing` does, without Triton."""

import json
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from furcate.builder.errors import RequestError
from furcate.model_repository.io_table import text_from_bytes
from furcate.model_repository.sampling_table import result_values
from furcate.model_repository.tables import POSTPROCESSING
from furcate.model_repository.text_stream import AnswerText, Decodes

NUM_KEPT_ANSWERS = 1024


class Texts:
    """The texts of the answers that are being streamed.

    Every response says which answer it belongs to and which tokens came before, so what is kept here only saves reading
    those again: an answer that was forgotten (too many, or a new process) is read anew and goes on with the same text.
    """

    def __init__(self, tokenizer: Decodes, *, num_kept_answers: int = NUM_KEPT_ANSWERS) -> None:
        self._tokenizer = tokenizer
        self._num_kept_answers = num_kept_answers
        self._kept: OrderedDict[int, AnswerText] = OrderedDict()

    def outputs(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of `postprocessing` for one response's tokens; RequestError says what is wrong with them."""
        values = POSTPROCESSING.read(tensors)
        ids = values["TOKENS_BATCH"].reshape(-1)[: int(values["SEQUENCE_LENGTH"].sum())].tolist()
        reason = text_from_bytes("FINISH_REASON", values["FINISH_REASON"][0]) if "FINISH_REASON" in values else "none"
        key = int(values["ANSWER_KEY"][0]) if "ANSWER_KEY" in values else None
        answer = self._answer(key, values)
        text = "".join(answer.push(token_id) for token_id in ids)
        if reason:
            text += answer.finish()
        elif key is not None:
            self._keep(key, answer)
        results = _results(values)
        return POSTPROCESSING.outputs_from(
            {"OUTPUT": [text.encode("utf-8", errors="replace")], "OUTPUT_IDS": ids, **result_values(results)}
        )

    @staticmethod
    def are_for_nobody(tensors: Mapping[str, np.ndarray]) -> bool:
        """True for a response that only shows whether the client is still there; nothing is answered to it."""
        return "RESULTS" in tensors and not any(tensors["RESULTS"].reshape(-1))

    def _answer(self, key: int | None, values: Mapping[str, np.ndarray]) -> AnswerText:
        earlier = values.get("EARLIER_IDS", np.zeros(0, np.int32))
        kept = None if key is None else self._kept.pop(key, None)
        if kept is not None and kept.num_ids == len(earlier):
            return kept
        stops = [text_from_bytes("STOP_TEXTS", item) for item in values.get("STOP_TEXTS", ())]
        num_unsearched_ids = int(values["NUM_UNSEARCHED_IDS"][0]) if "NUM_UNSEARCHED_IDS" in values else 0
        answer = AnswerText(self._tokenizer, stops=filter(None, stops), num_unsearched_ids=num_unsearched_ids)
        for token_id in earlier.tolist():
            answer.push(token_id)
        return answer

    def _keep(self, key: int, answer: AnswerText) -> None:
        self._kept[key] = answer
        while len(self._kept) > self._num_kept_answers:
            self._kept.popitem(last=False)


def _results(values: Mapping[str, np.ndarray]) -> dict[str, object]:
    """The results that `tensorrt_llm` sent along; none for callers of `postprocessing` alone."""
    reason: dict[str, object] = {"finish_reason": values["FINISH_REASON"]} if "FINISH_REASON" in values else {}
    if "RESULTS" not in values:
        return reason
    try:
        found = json.loads(text_from_bytes("RESULTS", values["RESULTS"][0]))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RequestError("'RESULTS' is not what tensorrt_llm gives as answer_results; leave it out.")
    return found | reason
