"""The tables against the contract of the ensemble that TensorRT-LLM had, against each other, and against the server."""

import json
import re
import urllib.request

import pytest

from furcate.client.server import TritonServer
from furcate.model_repository.io_table import ModelTable
from furcate.model_repository.tables import (
    ENSEMBLE,
    ENSEMBLE_STEPS,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
)

CONTRACT_INPUTS = """
text_input STRING[1], max_tokens INT32[1], num_return_sequences INT32[1], bad_words STRING[-1], stop_words STRING[-1],
exclude_input_in_output BOOL[1], end_id INT32[1], pad_id INT32[1], top_k INT32[1], top_p FP32[1], temperature FP32[1],
length_penalty FP32[1], repetition_penalty FP32[1], min_tokens INT32[1], presence_penalty FP32[1], frequency_penalty FP32[1],
seed UINT64[1], return_log_probs BOOL[1], return_context_logits BOOL[1], return_generation_logits BOOL[1],
return_perf_metrics BOOL[1], return_num_input_tokens BOOL[1], return_num_output_tokens BOOL[1], beam_width INT32[1],
stream BOOL[1], embedding_bias_words STRING[-1], embedding_bias_weights FP32[-1], guided_decoding_guide_type STRING[1],
guided_decoding_guide STRING[1], random_seed UINT64[1], min_length INT32[1], decoder_text_input STRING[1],
prompt_embedding_table FP16[-1,-1], prompt_vocab_size INT32[1], prompt_table_extra_ids UINT64[-1], lora_task_id UINT64[1],
lora_weights FP16[-1,-1], lora_config INT32[-1,3]
"""
CONTRACT_OUTPUTS = """
text_output STRING[-1], cum_log_probs FP32[-1], output_log_probs FP32[-1,-1], context_logits FP32[-1,-1],
generation_logits FP32[-1,-1,-1], batch_index INT32[1], sequence_index INT32[1], kv_cache_alloc_new_blocks INT32[1],
kv_cache_reused_blocks INT32[1], kv_cache_alloc_total_blocks INT32[1], total_accepted_draft_tokens INT32[1],
total_draft_tokens INT32[1], num_input_tokens INT32[1], num_output_tokens INT32[1], arrival_time_ns INT64[1],
first_scheduled_time_ns INT64[1], first_token_time_ns INT64[1], last_token_time_ns INT64[1], acceptance_rate FP32[1]
"""
TABLES = {table.name: table for table in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE)}


def fields_of(text: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (dtype, tuple(int(size) for size in shape.split(",")))
        for name, dtype, shape in re.findall(r"(\w+) (\w+)\[([-\d,]+)\]", text)
    }


def test_ensemble_has_the_old_contract_and_only_named_additions() -> None:
    inputs = {field.name: (field.dtype, field.shape) for field in ENSEMBLE.inputs if not field.is_addition}
    outputs = {field.name: (field.dtype, field.shape) for field in ENSEMBLE.outputs if not field.is_addition}
    assert inputs == fields_of(CONTRACT_INPUTS)
    assert outputs == fields_of(CONTRACT_OUTPUTS)
    added = {"apply_chat_template", "min_p", "prompt_ids", "logit_bias_ids", "logit_bias_values"}
    assert {field.name for field in ENSEMBLE.inputs if field.is_addition} == added
    additions = {field.name for field in ENSEMBLE.outputs if field.is_addition}
    assert additions == {"finish_reason", "is_lossless", "num_target_steps", "output_token_ids"}


def test_ensemble_requires_only_text_and_limit() -> None:
    assert [field.name for field in ENSEMBLE.inputs if not field.is_optional] == ["text_input", "max_tokens"]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_names_are_unique_and_explained(table: ModelTable) -> None:
    for fields in (table.inputs, table.outputs):
        assert len({field.name for field in fields}) == len(fields)
        assert all(field.meaning.endswith(".") for field in fields)


def test_ensemble_joins_every_tensor_to_one_of_the_same_kind() -> None:
    known = {field.name: field for field in ENSEMBLE.inputs}
    used: set[str] = set()
    for step in ENSEMBLE_STEPS:
        inputs = {field.name: field for field in TABLES[step.model_name].inputs}
        outputs = {field.name: field for field in TABLES[step.model_name].outputs}
        for name, source in step.inputs.items():
            assert inputs[name].dtype == known[source].dtype, f"{step.model_name}.{name}"
            assert inputs[name].is_optional or not known[source].is_optional
            used.add(source)
        known |= {target: outputs[name] for name, target in step.outputs.items()}
        assert {name for name, field in inputs.items() if not field.is_optional} <= step.inputs.keys()
    assert {field.name for field in ENSEMBLE.inputs} <= used, "an input that nothing reads would be ignored in silence"
    for field in ENSEMBLE.outputs:
        assert (known[field.name].dtype, known[field.name].shape) == (field.dtype, field.shape)


@pytest.mark.server
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_server_reports_what_the_table_says(table: ModelTable, tiny_server: TritonServer) -> None:
    with urllib.request.urlopen(f"{tiny_server.http_url}/v2/models/{table.name}/config") as answer:
        config = json.load(answer)

    def reported(kind: str) -> dict[str, tuple]:
        return {
            tensor["name"]: (
                tensor["data_type"].removeprefix("TYPE_"),
                tuple(int(size) for size in tensor["dims"]),
                tensor.get("optional", False),
            )
            for tensor in config[kind]
        }

    assert reported("input") == {field.name: (field.dtype, field.shape, field.is_optional) for field in table.inputs}
    assert reported("output") == {field.name: (field.dtype, field.shape, False) for field in table.outputs}
