"""config.json holds what TensorRT-LLM's own readers ask for, for every head kind.

Each list is the reader's: field names without a default in the file named beside it (github.com/NVIDIA/TensorRT-LLM).
"""

import json

import pytest

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.builder.trtllm_config import trtllm_config

ENGINE = {"version", "pretrained_config", "build_config"}  # builder.py, EngineConfig.from_json_str
PRETRAINED = {
    "architecture",
    "dtype",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
}  # models/modeling_utils.py
BUILD = {
    "max_input_len",
    "max_seq_len",
    "max_batch_size",
    "max_beam_width",
    "max_num_tokens",
    "opt_num_tokens",
    "kv_cache_type",
}
# builder.py, BuildConfig.from_dict
MEDUSA = {"num_medusa_heads", "num_medusa_layers", "max_draft_len"}  # models/medusa/config.py
EAGLE = {"eagle_net_config", "num_eagle_layers", "max_draft_len", "max_non_leaves_per_layer"}  # models/eagle/config.py
# What BuildConfig.from_dict takes out of build_config; other keys would be an error of a stricter reader.
BUILD_ALLOWED = BUILD | {
    "opt_batch_size", "max_prompt_embedding_table_size", "gather_context_logits", "gather_generation_logits", "strongly_typed",
    "force_num_profiles", "weight_sparsity", "profiling_verbosity", "enable_debug_output", "max_draft_len",
    "speculative_decoding_mode", "use_refit", "input_timing_cache", "output_timing_cache", "lora_config",
    "auto_parallel_config", "max_encoder_input_len", "weight_streaming", "use_strip_plan", "plugin_config", "dry_run",
    "visualize_network", "monitor_memory", "use_mrope",
}  # fmt: skip
# SpeculativeDecodingMode(IntFlag) in models/modeling_utils.py, in order, each auto().
MODES = ["NONE", "DRAFT_TOKENS_EXTERNAL", "MEDUSA", "LOOKAHEAD_DECODING", "EXPLICIT_DRAFT_TOKENS", "EAGLE"]


def config_of(tiny_engine, head) -> dict:
    path = tiny_engine(head)
    written = json.loads((path / "config.json").read_text())
    assert written == json.loads(json.dumps(trtllm_config(read_engine(path).manifest)))
    return written


@pytest.mark.parametrize(("head", "extra", "mode"), [
    (None, set(), "NONE"), ("medusa", MEDUSA, "MEDUSA"), ("eagle", EAGLE, "EAGLE"), ("eagle3", EAGLE, "EAGLE"),
])  # fmt: skip
def test_every_field_that_the_readers_ask_for_is_there(tiny_engine, head, extra, mode):
    config = config_of(tiny_engine, head)
    assert set(config) == ENGINE
    assert set(config["pretrained_config"]) >= PRETRAINED | extra
    assert BUILD <= set(config["build_config"]) <= BUILD_ALLOWED
    assert config["build_config"]["speculative_decoding_mode"] == 1 << MODES.index(mode)
    assert config["build_config"]["kv_cache_type"] == "PAGED"


def test_the_eagle_layer_is_a_llama_of_its_own(tiny_engine):
    config = config_of(tiny_engine, "eagle3")["pretrained_config"]
    assert config["architecture"] == "EagleForCausalLM"
    net = config["eagle_net_config"]
    assert set(net) >= PRETRAINED
    assert (net["architecture"], net["num_hidden_layers"], net["hidden_size"]) == ("LlamaForCausalLM", 1, 64)
    assert (config["num_hidden_layers"], config["vocab_size"], config["head_size"]) == (6, 300, 16)


def test_rotary_scaling_is_spelled_for_old_and_new_readers(tiny_target, tmp_path):
    source = json.loads((tiny_target / "config.json").read_text())
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    changed = tmp_path / "target"
    changed.mkdir()
    for file in tiny_target.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    (changed / "config.json").write_text(json.dumps({**source, "rope_parameters": rope}))
    build_engine(BuildConfig(target=changed, output=tmp_path / "engine", dtype=DataType.FLOAT32))
    config = json.loads((tmp_path / "engine" / "config.json").read_text())["pretrained_config"]
    assert config["rotary_scaling"] == {"factor": 2.0, "type": "linear", "rope_type": "linear"}
