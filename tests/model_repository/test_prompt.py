"""Text to tokens."""

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from furcate.builder.errors import RequestError
from furcate.model_repository.prompt import Prompts
from furcate.model_repository.word_lists import sequences_from_tensor


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_target)


def outputs(tokenizer: PreTrainedTokenizerFast, text: str = "Hi", **inputs: np.ndarray) -> dict[str, np.ndarray]:
    prompts = Prompts(tokenizer, end_ids=(1,), vocab_size=300)
    query = {"QUERY": np.array([[text.encode()]], np.object_), "REQUEST_OUTPUT_LEN": np.array([[4]], np.int32)}
    return prompts.outputs({**query, **inputs})


def words(*values: str) -> np.ndarray:
    return np.array([[value.encode() for value in values]], np.object_)


def test_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    made = outputs(tokenizer, "Hi é")
    assert made["INPUT_ID"].tolist() == [tokenizer.encode("Hi é")]
    assert made["REQUEST_INPUT_LEN"].tolist() == [[5]]
    assert made["REQUEST_OUTPUT_LEN"].tolist() == [[4]]
    assert made["OUT_END_ID"].tolist() == [[1]]
    assert made["STOP_WORDS_IDS"].shape == made["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert made["EMBEDDING_BIAS"].shape == (1, 0)


def test_chat_template_is_the_tokenizers(tokenizer: PreTrainedTokenizerFast) -> None:
    made = outputs(tokenizer, "Hi", APPLY_CHAT_TEMPLATE=np.array([[True]]))
    assert made["INPUT_ID"].tolist() == [[0, *tokenizer.encode("Hi"), 1]]
    off = outputs(tokenizer, "Hi", APPLY_CHAT_TEMPLATE=np.array([[False]]))
    assert off["INPUT_ID"].tolist() == [tokenizer.encode("Hi")]


def test_chat_without_a_template_is_refused(tiny_target: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target)
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="this target's tokenizer has no chat template"):
        outputs(tokenizer, "Hi", APPLY_CHAT_TEMPLATE=np.array([[True]]))


def test_a_prompt_of_tokens_is_taken_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = np.array([[0, 7, 1]], np.int32)
    assert outputs(tokenizer, "", PROMPT_IDS=ids)["INPUT_ID"].tolist() == [[0, 7, 1]]
    for other in ({"text": "Hi"}, {"APPLY_CHAT_TEMPLATE": np.array([[True]])}):
        with pytest.raises(RequestError, match="'prompt_ids' is the whole prompt; send 'text_input' empty"):
            outputs(tokenizer, **{"text": "", "PROMPT_IDS": ids, **other})


def test_logit_bias_names_tokens_and_adds_to_the_words(tokenizer: PreTrainedTokenizerFast) -> None:
    (letter,) = tokenizer.encode("a")
    ids, values = np.array([[letter, 0, 0]], np.int32), np.array([[1.0, -2.0, 0.5]], np.float32)
    weights = {"EMBEDDING_BIAS_WORDS": words("a"), "EMBEDDING_BIAS_WEIGHTS": np.array([[3.0]], np.float32)}
    bias = outputs(tokenizer, LOGIT_BIAS_IDS=ids, LOGIT_BIAS_VALUES=values, **weights)["EMBEDDING_BIAS"][0]
    assert {int(token): float(bias[token]) for token in np.flatnonzero(bias)} == {letter: 4.0, 0: -1.5}
    with pytest.raises(RequestError, match="'logit_bias_ids' has 3 tokens and 'logit_bias_values' 0 weights"):
        outputs(tokenizer, LOGIT_BIAS_IDS=ids)
    with pytest.raises(
        RequestError, match="'logit_bias_ids' names token 300, but the vocabulary has the tokens 0 to 299"
    ):
        outputs(tokenizer, LOGIT_BIAS_IDS=np.array([[300]], np.int32), LOGIT_BIAS_VALUES=values[:, :1])


def test_stop_words_as_they_stand_and_bad_words_behind_a_space_too(tokenizer: PreTrainedTokenizerFast) -> None:
    made = outputs(tokenizer, STOP_WORDS_DICT=words("END", ""), BAD_WORDS_DICT=words("no"))
    end, no, spaced = (tuple(tokenizer.encode(word)) for word in ("END", "no", " no"))
    assert sequences_from_tensor("stop", made["STOP_WORDS_IDS"][0]) == (end,)
    assert sequences_from_tensor("bad", made["BAD_WORDS_IDS"][0]) == (no, spaced)


def test_end_and_pad_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    made = outputs(tokenizer, END_ID=np.array([[7]], np.int32), PAD_ID=np.array([[9]], np.int32))
    assert (made["OUT_END_ID"].tolist(), made["OUT_PAD_ID"].tolist()) == ([[7]], [[9]])
    assert outputs(tokenizer, END_ID=np.array([[-1]], np.int32))["OUT_END_ID"].shape == (1, 0)


def test_bias_falls_on_the_words_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    weights = np.array([[2.0, -1.0]], np.float32)
    bias = outputs(tokenizer, EMBEDDING_BIAS_WORDS=words("a", "b"), EMBEDDING_BIAS_WEIGHTS=weights)["EMBEDDING_BIAS"][0]
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    assert (bias[a], bias[b], np.count_nonzero(bias)) == (2.0, -1.0, 2)


def test_empty_text_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RequestError, match="'text_input' is empty"):
        outputs(tokenizer, "")


def test_what_did_not_come_is_filled_in_and_named(tokenizer: PreTrainedTokenizerFast) -> None:
    made = outputs(tokenizer, TEMPERATURE=np.array([[0.7]], np.float32), STOP_WORDS_DICT=words("END"))
    assert made["OUT_TEMPERATURE"].tolist() == [[np.float32(0.7)]]
    assert made["OUT_STOP_TEXTS"].tolist() == [[b"END"]]
    assert made["OUT_RUNTIME_TOP_K"].tolist() == [[0]]
    assert made["OUT_GUIDED_DECODING_GUIDE"].tolist() == [[b""]]
    absent = made["ABSENT_INPUTS"][0].tolist()
    assert "runtime_top_k" in absent
    assert "temperature" not in absent
    assert set(made) == set(outputs(tokenizer)), "every request hands on the same tensors"


def test_what_cannot_be_used_is_refused_here(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RequestError, match="'beam_width' cannot be used: beam search is not supported"):
        outputs(tokenizer, BEAM_WIDTH=np.array([[4]], np.int32))
    assert "OUT_BEAM_WIDTH" not in outputs(tokenizer, BEAM_WIDTH=np.array([[1]], np.int32))
