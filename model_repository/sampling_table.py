"""The inputs that say how a text is chosen, and the counts that come back: shared by `ensemble` and `tensorrt_llm`."""

from collections.abc import Mapping

from furcate.model_repository.io_table import Field


def _one(name: str, dtype: str, meaning: str) -> Field:
    return Field(name=name, dtype=dtype, shape=(1,), meaning=meaning, is_optional=True)


def _count(name: str, meaning: str, dtype: str = "INT32") -> Field:
    return Field(name=name, dtype=dtype, shape=(1,), meaning=meaning)


_NO_LORA = "LoRA adapters are not supported; merge the adapter into the target and build the engine from that."
_NO_PROMPT_TABLE = "prompt embedding tables are not supported; send the prompt as text."
_NO_LOGITS = "logits are not returned; leave it out or send false."

SAMPLING_INPUTS: tuple[Field, ...] = (
    _one("temperature", "FP32", "Divides the logits; 0 is greedy. Default: greedy, or 1 when top_k or top_p is given."),
    _one("top_k", "INT32", "Sample from the k likeliest tokens; 0 is no limit, 1 is greedy."),
    _one(
        "top_p",
        "FP32",
        "Sample from the likeliest tokens that hold this probability; 1 (or 0 beside top_k) is no limit.",
    ),
    Field(
        name="min_p",
        dtype="FP32",
        shape=(1,),
        is_optional=True,
        is_addition=True,
        meaning="Leave out tokens less likely than this share of the likeliest one's probability.",
    ),
    _one("seed", "UINT64", "Makes a sampled text repeatable, alone or in company. Default: a fresh one."),
    _one("random_seed", "UINT64", "Older name of seed."),
    _one("min_tokens", "INT32", "Neither end_id nor stop words before this many tokens."),
    _one("guided_decoding_guide_type", "STRING", "What the text must match: json, json_schema, regex or ebnf_grammar."),
    _one("guided_decoding_guide", "STRING", "The schema, expression or grammar; nothing for json."),
    _one("min_length", "INT32", "Older name of min_tokens."),
    _one(
        "repetition_penalty",
        "FP32",
        "Divides positive logits of tokens already in the text (multiplies negative ones).",
    ),
    _one("presence_penalty", "FP32", "Subtracted once from the logits of tokens already generated."),
    _one("frequency_penalty", "FP32", "Subtracted from a token's logit for each time it was generated."),
    Field(
        name="length_penalty",
        dtype="FP32",
        shape=(1,),
        is_optional=True,
        meaning="Only beam search has a use for it.",
        neutral=(0.0, 1.0),
        refusal="it changes nothing without beam search; leave it out or send 1.",
    ),
    Field(
        name="beam_width",
        dtype="INT32",
        shape=(1,),
        is_optional=True,
        meaning="Must be 1.",
        neutral=(1,),
        refusal="beam search is not supported; send 1.",
    ),
    Field(
        name="num_return_sequences",
        dtype="INT32",
        shape=(1,),
        is_optional=True,
        meaning="Must be 1.",
        neutral=(1,),
        refusal="a request gives one text; send 1, and one request for each text.",
    ),
    _one("stream", "BOOL", "False: exactly one response. True: one for each step that gives tokens."),
    _one(
        "exclude_input_in_output", "BOOL", "False puts the prompt before the text (only without stream). Default: true."
    ),
    _one(
        "return_log_probs",
        "BOOL",
        "Fill cum_log_probs and output_log_probs: of the model's own logits, before any of the above.",
    ),
    _one("return_perf_metrics", "BOOL", "Accepted; the times and counts always come."),
    _one("return_num_input_tokens", "BOOL", "Accepted; num_input_tokens always comes."),
    _one("return_num_output_tokens", "BOOL", "Accepted; num_output_tokens always comes."),
    *(
        Field(
            name=name,
            dtype="BOOL",
            shape=(1,),
            is_optional=True,
            meaning="Must be false.",
            neutral=(False,),
            refusal=_NO_LOGITS,
        )
        for name in ("return_context_logits", "return_generation_logits")
    ),
    *(
        Field(name=name, dtype=dtype, shape=shape, is_optional=True, meaning="Must be left out.", refusal=refusal)
        for name, dtype, shape, refusal in (
            ("prompt_embedding_table", "FP16", (-1, -1), _NO_PROMPT_TABLE),
            ("prompt_vocab_size", "INT32", (1,), _NO_PROMPT_TABLE),
            ("prompt_table_extra_ids", "UINT64", (-1,), _NO_PROMPT_TABLE),
            ("lora_task_id", "UINT64", (1,), _NO_LORA),
            ("lora_weights", "FP16", (-1, -1), _NO_LORA),
            ("lora_config", "INT32", (-1, 3), _NO_LORA),
        )
    ),
)
"""Under the ensemble's names."""

ENGINE_NAMES = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
"""What `tensorrt_llm` calls an input of the ensemble, where the two names differ."""

RESULT_OUTPUTS: tuple[Field, ...] = (
    Field(
        name="cum_log_probs",
        dtype="FP32",
        shape=(-1,),
        meaning="Sum of the tokens' log probabilities so far, when asked for; else empty.",
    ),
    Field(
        name="output_log_probs", dtype="FP32", shape=(-1, -1), meaning="One for each token, when asked for; else empty."
    ),
    Field(name="context_logits", dtype="FP32", shape=(-1, -1), meaning="Always empty."),
    Field(name="generation_logits", dtype="FP32", shape=(-1, -1, -1), meaning="Always empty."),
    _count("batch_index", "Always 0: a request carries one prompt."),
    _count("sequence_index", "Always 0: a request gives one text."),
    _count("kv_cache_alloc_new_blocks", "Pages taken for this request."),
    _count("kv_cache_reused_blocks", "Pages shared with earlier requests."),
    _count("kv_cache_alloc_total_blocks", "Both together."),
    _count("total_accepted_draft_tokens", "Draft tokens accepted so far."),
    _count("total_draft_tokens", "Draft tokens proposed so far."),
    _count("num_input_tokens", "Tokens of the prompt."),
    _count("num_output_tokens", "Generated tokens of this response; the answer's are the sum over its responses."),
    _count("arrival_time_ns", "When the request came, Unix time in nanoseconds.", "INT64"),
    _count("first_scheduled_time_ns", "When its first step began; 0 until then.", "INT64"),
    _count("first_token_time_ns", "When its first token came; 0 until then.", "INT64"),
    _count("last_token_time_ns", "When its newest token came; 0 until then.", "INT64"),
    _count("acceptance_rate", "Accepted draft tokens over proposed ones.", "FP32"),
    Field(
        name="num_target_steps",
        dtype="INT32",
        shape=(1,),
        is_addition=True,
        meaning="Target passes after the prompt's; tau = (the sum of num_output_tokens - 1) / num_target_steps.",
    ),
    Field(
        name="is_lossless",
        dtype="BOOL",
        shape=(1,),
        is_addition=True,
        meaning="False where the engine accepts by a lossy rule (typical): the text's law is then not the target's.",
    ),
    Field(
        name="finish_reason",
        dtype="STRING",
        shape=(1,),
        is_addition=True,
        meaning="Empty until the last response: end_id, stop, length or cancelled.",
    ),
)
"""`tensorrt_llm`, `postprocessing` and `ensemble` give these under the same names."""


def result_values(results: Mapping[str, object]) -> dict[str, object]:
    """A value for each of RESULT_OUTPUTS: those given, and for the others zero, or nothing where their size is free."""
    return {field.name: results.get(field.name, field.filled_in()) for field in RESULT_OUTPUTS}
