"""Text to tokens: what `preprocessing` does, without Triton."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from furcate.builder.errors import RequestError
from furcate.model_repository.io_table import text_from_bytes
from furcate.model_repository.sampling_table import ENGINE_NAMES, SAMPLING_INPUTS
from furcate.model_repository.tables import HANDED_ON, PREPROCESSING
from furcate.model_repository.word_lists import tensor_from_sequences


class Prompts:
    """Reads requests to `preprocessing` with the target's tokenizer (a transformers one)."""

    def __init__(self, tokenizer: Any, *, end_ids: tuple[int, ...], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def outputs(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of `preprocessing` for one request's inputs; RequestError says what is wrong with them."""
        values = PREPROCESSING.read(tensors)
        ids = self._prompt_ids(values)
        end_ids = values["END_ID"].tolist() if "END_ID" in values else list(self._end_ids)
        end_ids = [] if end_ids == [-1] else end_ids
        pad_ids = values["PAD_ID"].tolist() if "PAD_ID" in values else [*end_ids, 0][:1]
        return PREPROCESSING.outputs_from(
            {
                "INPUT_ID": ids,
                "REQUEST_INPUT_LEN": [len(ids)],
                "REQUEST_OUTPUT_LEN": values["REQUEST_OUTPUT_LEN"],
                "BAD_WORDS_IDS": self._word_list(values, "BAD_WORDS_DICT", with_space=True),
                "STOP_WORDS_IDS": self._word_list(values, "STOP_WORDS_DICT", with_space=False),
                "EMBEDDING_BIAS": self._embedding_bias(values),
                "OUT_END_ID": end_ids,
                "OUT_PAD_ID": pad_ids,
                "OUT_STOP_TEXTS": values.get("STOP_WORDS_DICT", ()),
                **_handed_on(values),
            }
        )

    def _prompt_ids(self, values: Mapping[str, np.ndarray]) -> list[int]:
        text = text_from_bytes("text_input", values["QUERY"][0])
        is_chat = values.get("APPLY_CHAT_TEMPLATE", [False])[0]
        if "PROMPT_IDS" in values:
            if text or is_chat:
                raise RequestError(
                    "'prompt_ids' is the whole prompt; send 'text_input' empty and leave 'apply_chat_template' out."
                )
            return values["PROMPT_IDS"].tolist()
        if not text:
            raise RequestError("'text_input' is empty; send at least one character.")
        if not is_chat:
            return self._tokenizer.encode(text)
        if not self._tokenizer.chat_template:
            raise RequestError("'apply_chat_template' is true, but this target's tokenizer has no chat template.")
        message = {"role": "user", "content": text}
        encoded = self._tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"]

    def _word_list(self, values: Mapping[str, np.ndarray], name: str, *, with_space: bool) -> np.ndarray:
        """The words' token sequences.

        A bad word is barred as it stands and behind a space. A stop word ends the text before itself, not before a
        space in front of it, so it is listed as it stands; `tensorrt_llm` finds its other tokenisations in the text.
        """
        words = [text_from_bytes(PREPROCESSING.label_of(name), item) for item in values.get(name, ())]
        sequences = {}
        for word in words:
            for spelling in (word, f" {word}") if with_space else (word,):
                sequence = tuple(self._tokenizer.encode(spelling, add_special_tokens=False)) if word else ()
                if sequence:
                    sequences[sequence] = None
        return tensor_from_sequences(list(sequences))

    def _embedding_bias(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        words, word_weights = _pairs(values, "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
        ids, id_weights = _pairs(values, "LOGIT_BIAS_IDS", "LOGIT_BIAS_VALUES")
        if not words and not ids:
            return np.zeros(0, np.float32)
        bias = np.zeros(self._vocab_size, np.float32)
        for item, weight in zip(words, word_weights, strict=True):
            word = text_from_bytes("embedding_bias_words", item)
            bias[self._tokenizer.encode(word, add_special_tokens=False)] += weight
        for token_id, weight in zip(ids, id_weights, strict=True):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"'logit_bias_ids' names token {token_id}, but the vocabulary has the tokens 0 to {self._vocab_size - 1}."
                )
            bias[token_id] += weight
        return bias


def _handed_on(values: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Every input that is only handed on, and the names of those that did not come."""
    fields = [field for field in SAMPLING_INPUTS if field.name in HANDED_ON]
    absent = [field.name for field in fields if field.name.upper() not in values]
    return {
        **{HANDED_ON[field.name]: values.get(field.name.upper(), field.filled_in()) for field in fields},
        "ABSENT_INPUTS": [ENGINE_NAMES.get(name, name) for name in absent],
    }


def _pairs(values: Mapping[str, np.ndarray], name: str, weights_name: str) -> tuple[list[Any], list[float]]:
    """What is biased, and by how much; RequestError when the two lists differ in length."""
    items, weights = values.get(name, np.zeros(0)).tolist(), values.get(weights_name, np.zeros(0)).tolist()
    if len(items) != len(weights):
        noun = "words" if name == "EMBEDDING_BIAS_WORDS" else "tokens"
        raise RequestError(
            f"'{PREPROCESSING.label_of(name)}' has {len(items)} {noun} and '{PREPROCESSING.label_of(weights_name)}'"
            f" {len(weights)} weights; send one weight for each."
        )
    return items, weights
