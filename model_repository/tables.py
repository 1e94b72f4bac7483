"""The four models of the repository: their I/O tables, and how the ensemble joins them."""

from dataclasses import dataclass, replace

from furcate.model_repository.io_table import Field, ModelTable
from furcate.model_repository.sampling_table import ENGINE_NAMES, RESULT_OUTPUTS, SAMPLING_INPUTS


def _field(name: str, dtype: str, shape: tuple[int, ...], meaning: str) -> Field:
    return Field(name=name, dtype=dtype, shape=shape, meaning=meaning)


def _optional(name: str, dtype: str, shape: tuple[int, ...], meaning: str, *, is_addition: bool = False) -> Field:
    return Field(name=name, dtype=dtype, shape=shape, meaning=meaning, is_optional=True, is_addition=is_addition)


_TEXT_INPUTS = (
    (_field("text_input", "STRING", (1,), "The prompt."), "QUERY"),
    (_field("max_tokens", "INT32", (1,), "How many tokens to generate at most."), "REQUEST_OUTPUT_LEN"),
    (
        Field(
            name="decoder_text_input",
            dtype="STRING",
            shape=(1,),
            is_optional=True,
            meaning="Must be left out.",
            refusal="encoder-decoder models are not supported; put the whole prompt into text_input.",
        ),
        "DECODER_QUERY",
    ),
    (_optional("bad_words", "STRING", (-1,), "Texts that must not appear."), "BAD_WORDS_DICT"),
    (_optional("stop_words", "STRING", (-1,), "The text ends before the first of these."), "STOP_WORDS_DICT"),
    (_optional("embedding_bias_words", "STRING", (-1,), "Words whose tokens' logits change."), "EMBEDDING_BIAS_WORDS"),
    (_optional("embedding_bias_weights", "FP32", (-1,), "By how much, one for each word."), "EMBEDDING_BIAS_WEIGHTS"),
    (
        _optional(
            "prompt_ids",
            "INT32",
            (-1,),
            "The prompt as tokens, taken as they are; text_input must then be empty.",
            is_addition=True,
        ),
        "PROMPT_IDS",
    ),
    (
        _optional("logit_bias_ids", "INT32", (-1,), "Tokens whose logits change.", is_addition=True),
        "LOGIT_BIAS_IDS",
    ),
    (
        _optional("logit_bias_values", "FP32", (-1,), "By how much, one for each token.", is_addition=True),
        "LOGIT_BIAS_VALUES",
    ),
    (_optional("end_id", "INT32", (1,), "The token that ends the text; -1 is none. Default: the target's."), "END_ID"),
    (_optional("pad_id", "INT32", (1,), "Accepted; outputs are never padded."), "PAD_ID"),
    (
        _optional(
            "apply_chat_template",
            "BOOL",
            (1,),
            "True: text_input is a user's message and is put into the target's chat template.",
            is_addition=True,
        ),
        "APPLY_CHAT_TEMPLATE",
    ),
)
"""The ensemble's inputs that `preprocessing` reads, each with its name there."""

HANDED_ON = {
    field.name: f"OUT_{ENGINE_NAMES.get(field.name, field.name).upper()}"
    for field in SAMPLING_INPUTS
    if field.refusal is None
}
"""The ensemble's inputs that `preprocessing` only hands on, each with its output there.

Triton joins requests in one step only when they bring the same set of inputs. Clients leave out what they do not need, so
`preprocessing` gives `tensorrt_llm` every input, and says which of them did not come.
"""

PREPROCESSING = ModelTable(
    name="preprocessing",
    inputs=(
        *(field.renamed(name) for field, name in _TEXT_INPUTS),
        *(replace(field, is_addition=True).renamed(field.name.upper()) for field in SAMPLING_INPUTS),
    ),
    outputs=(
        _field("INPUT_ID", "INT32", (-1,), "The prompt's tokens."),
        _field("REQUEST_INPUT_LEN", "INT32", (1,), "How many they are."),
        _field("REQUEST_OUTPUT_LEN", "INT32", (1,), "As it came."),
        _field("BAD_WORDS_IDS", "INT32", (2, -1), "Token sequences end to end, and where each ends (-1 pads)."),
        _field("STOP_WORDS_IDS", "INT32", (2, -1), "The same for the stop words."),
        _field("EMBEDDING_BIAS", "FP32", (-1,), "Added to the logits; empty when there is none."),
        _field("OUT_END_ID", "INT32", (-1,), "The tokens that end the text; empty when none does."),
        _field("OUT_PAD_ID", "INT32", (1,), "As it came, or the first end_id."),
        Field(name="OUT_STOP_TEXTS", dtype="STRING", shape=(-1,), is_addition=True, meaning="The stop words as texts."),
        *(
            Field(
                name=HANDED_ON[field.name],
                dtype=field.dtype,
                shape=field.shape,
                is_addition=True,
                meaning=f"{field.name} as it came, or zero.",
            )
            for field in SAMPLING_INPUTS
            if field.name in HANDED_ON
        ),
        Field(
            name="ABSENT_INPUTS",
            dtype="STRING",
            shape=(-1,),
            is_addition=True,
            meaning="Which of `tensorrt_llm`'s inputs did not come and are only filled in.",
        ),
    ),
)

ANSWER_RESULTS = Field(
    name="answer_results",
    dtype="STRING",
    shape=(1,),
    is_addition=True,
    meaning="All the other results of this response in one, for `postprocessing` to give out; empty in a response without any.",
)

TENSORRT_LLM = ModelTable(
    name="tensorrt_llm",
    inputs=(
        _field("input_ids", "INT32", (-1,), "The prompt's tokens."),
        _field("input_lengths", "INT32", (1,), "How many of them count."),
        _field("request_output_len", "INT32", (1,), "How many tokens to generate at most."),
        _optional("end_id", "INT32", (-1,), "The tokens that end the text. Default: the target's."),
        _optional("pad_id", "INT32", (1,), "Accepted; outputs are never padded."),
        _optional("stop_words_list", "INT32", (2, -1), "Token sequences end to end, and where each ends (-1 pads)."),
        _optional("bad_words_list", "INT32", (2, -1), "The same for sequences that must not appear."),
        _optional("embedding_bias", "FP32", (-1,), "Added to the logits, one for each token of the vocabulary."),
        _optional("stop", "BOOL", (1,), "True: end the running request that has this request's id."),
        _optional("stop_texts", "STRING", (-1,), "The text ends before the first of these.", is_addition=True),
        *(field.renamed(ENGINE_NAMES.get(field.name, field.name)) for field in SAMPLING_INPUTS),
        _optional(
            "absent_inputs",
            "STRING",
            (-1,),
            "Optional inputs that are only filled in, and count as left out: requests share a step only when they bring"
            " the same set of inputs.",
            is_addition=True,
        ),
    ),
    outputs=(
        _field("output_ids", "INT32", (-1, -1), "This response's tokens: [1, n]."),
        _field("sequence_length", "INT32", (-1,), "How many they are."),
        *RESULT_OUTPUTS,
        Field(
            name="answer_key",
            dtype="INT64",
            shape=(1,),
            is_addition=True,
            meaning="The same in all responses of one answer, and in no other answer's.",
        ),
        Field(
            name="earlier_ids",
            dtype="INT32",
            shape=(-1,),
            is_addition=True,
            meaning="The tokens of this answer's earlier responses.",
        ),
        Field(
            name="num_unsearched_ids",
            dtype="INT32",
            shape=(1,),
            is_addition=True,
            meaning="In how many leading tokens no stop text is looked for: the prompt's, and the first min_tokens.",
        ),
        Field(
            name="answer_stop_texts",
            dtype="STRING",
            shape=(-1,),
            is_addition=True,
            meaning="stop_texts again: Triton lets postprocessing have them only through this model.",
        ),
        ANSWER_RESULTS,
    ),
)

POSTPROCESSING = ModelTable(
    name="postprocessing",
    inputs=(
        _field("TOKENS_BATCH", "INT32", (-1, -1), "This response's tokens: [1, n]."),
        _field("SEQUENCE_LENGTH", "INT32", (-1,), "How many of them count."),
        _optional("ANSWER_KEY", "INT64", (1,), "Which answer they belong to.", is_addition=True),
        _optional("EARLIER_IDS", "INT32", (-1,), "The tokens of its earlier responses.", is_addition=True),
        _optional(
            "NUM_UNSEARCHED_IDS",
            "INT32",
            (1,),
            "In how many leading tokens no stop text is looked for.",
            is_addition=True,
        ),
        _optional("FINISH_REASON", "STRING", (1,), "Empty while more is to come.", is_addition=True),
        _optional("RESULTS", "STRING", (1,), "What `tensorrt_llm` gave as answer_results.", is_addition=True),
        _optional("STOP_TEXTS", "STRING", (-1,), "The text ends before the first of these.", is_addition=True),
    ),
    outputs=(
        _field("OUTPUT", "STRING", (-1,), "This response's text."),
        Field(
            name="OUTPUT_IDS",
            dtype="INT32",
            shape=(-1,),
            is_addition=True,
            meaning="This response's tokens, in one row.",
        ),
        *(replace(field, is_addition=True) for field in RESULT_OUTPUTS),
    ),
)

ENSEMBLE = ModelTable(
    name="ensemble",
    inputs=(*(field for field, _ in _TEXT_INPUTS), *SAMPLING_INPUTS),
    outputs=(
        _field("text_output", "STRING", (-1,), "The text, or this response's part of it."),
        *RESULT_OUTPUTS,
        Field(
            name="output_token_ids",
            dtype="INT32",
            shape=(-1,),
            is_addition=True,
            meaning="The tokens behind text_output.",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble; both maps go from the model's tensor name to the ensemble's."""

    model_name: str
    inputs: dict[str, str]
    outputs: dict[str, str]


ENSEMBLE_STEPS = (
    EnsembleStep(
        model_name="preprocessing",
        inputs={
            **{name: field.name for field, name in _TEXT_INPUTS},
            **{field.name.upper(): field.name for field in SAMPLING_INPUTS},
        },
        outputs={field.name: f"_{field.name}" for field in PREPROCESSING.outputs},
    ),
    EnsembleStep(
        model_name="tensorrt_llm",
        inputs={
            "input_ids": "_INPUT_ID",
            "input_lengths": "_REQUEST_INPUT_LEN",
            "request_output_len": "_REQUEST_OUTPUT_LEN",
            "end_id": "_OUT_END_ID",
            "pad_id": "_OUT_PAD_ID",
            "stop_words_list": "_STOP_WORDS_IDS",
            "bad_words_list": "_BAD_WORDS_IDS",
            "embedding_bias": "_EMBEDDING_BIAS",
            "stop_texts": "_OUT_STOP_TEXTS",
            **{ENGINE_NAMES.get(name, name): f"_{output}" for name, output in HANDED_ON.items()},
            "absent_inputs": "_ABSENT_INPUTS",
        },
        outputs={
            "output_ids": "_TOKENS_BATCH",
            "sequence_length": "_SEQUENCE_LENGTH",
            "answer_key": "_ANSWER_KEY",
            "earlier_ids": "_EARLIER_IDS",
            "num_unsearched_ids": "_NUM_UNSEARCHED_IDS",
            "answer_stop_texts": "_STOP_TEXTS",
            "finish_reason": "_FINISH_REASON",
            "answer_results": "_RESULTS",
        },
    ),
    EnsembleStep(
        model_name="postprocessing",
        inputs={
            "TOKENS_BATCH": "_TOKENS_BATCH",
            "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
            "ANSWER_KEY": "_ANSWER_KEY",
            "EARLIER_IDS": "_EARLIER_IDS",
            "NUM_UNSEARCHED_IDS": "_NUM_UNSEARCHED_IDS",
            "FINISH_REASON": "_FINISH_REASON",
            "STOP_TEXTS": "_STOP_TEXTS",
            "RESULTS": "_RESULTS",
        },
        outputs={
            "OUTPUT": "text_output",
            "OUTPUT_IDS": "output_token_ids",
            **{field.name: field.name for field in RESULT_OUTPUTS},
        },
    ),
)
