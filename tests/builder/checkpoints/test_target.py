"""Targets of every family, made small and random by transformers, saved, and read back."""

import copy
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from furcate.builder.checkpoints.target import TargetCheckpoint, read_target
from furcate.builder.network.spec import Activation, RopeSpec

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama_bias": LlamaConfig(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=32),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=32),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=256),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
# What each family's DecoderSpec says beyond plain Llama.
EXPECTED = {
    "llama": {"architecture": "LlamaForCausalLM", "is_tied": False, "has_qkv_bias": False, "sliding_window": None},
    "llama_bias": {"has_qkv_bias": True, "has_output_bias": True},
    "mistral": {"head_dim": 24, "sliding_window": 32, "sliding_layers": None},
    "qwen2": {"has_qkv_bias": True, "has_output_bias": False, "sliding_window": 32, "sliding_layers": (1,)},
    "qwen3": {"has_qk_norm": True, "has_qkv_bias": False, "sliding_window": None},
    "gemma2": {
        "is_tied": True,
        "activation": Activation.GELU_TANH,
        "has_sandwich_norms": True,
        "has_unit_offset_norm": True,
        "embedding_scale": 8.0,
        "attention_scale": 256**-0.5,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "sliding_window": 32,
        "sliding_layers": (0,),
    },
    "gemma3": {
        "has_qk_norm": True,
        "attention_softcap": None,
        "logit_softcap": None,
        "sliding_layers": (0,),
        "rope": RopeSpec(theta=1_000_000.0),
        "local_rope": RopeSpec(theta=10_000.0),
    },
    "phi3": {"architecture": "Phi3ForCausalLM", "has_qkv_bias": False, "sliding_window": None},
    "mixtral": {"num_experts": 4, "num_experts_per_token": 2, "normalizes_expert_weights": True},
    "qwen3_moe": {"num_experts": 4, "intermediate_size": 32, "has_qk_norm": True, "normalizes_expert_weights": True},
}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(5)
    # Saving writes the dtype into the configuration, so each model gets its own.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32)
    # Biases and norms start as zeros and ones, which would hide a swap.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def saved(name: str, directory: Path, **options) -> tuple[PreTrainedModel, Path]:
    model = made(name)
    model.save_pretrained(directory, **options)
    return model, directory


def assert_has_the_models_weights(target: TargetCheckpoint, model: PreTrainedModel):
    """Every named tensor equals the model's own parameters, fused ones row by row."""
    own, weights, spec = model.state_dict(), target.weights, target.spec
    assert torch.equal(weights["embed_tokens.weight"], own["model.embed_tokens.weight"])
    assert torch.equal(weights["norm.weight"], own["model.norm.weight"])
    assert ("lm_head.weight" in weights) is not spec.is_tied
    for i in range(spec.num_layers):
        layer, mine = f"model.layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if spec.has_qkv_bias else ("weight",):
            parts = [own.get(f"{layer}.self_attn.{name}_proj.{kind}") for name in "qkv"]
            fused = own[f"{layer}.self_attn.qkv_proj.{kind}"] if parts[0] is None else torch.cat(parts)
            assert torch.equal(weights[f"{mine}.qkv.{kind}"], fused)
        assert torch.equal(weights[f"{mine}.o.weight"], own[f"{layer}.self_attn.o_proj.weight"])
        norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
        if spec.has_sandwich_norms:
            norms |= {"attention_out_norm": "post_attention_layernorm", "post_norm": "pre_feedforward_layernorm"}
            norms["mlp_out_norm"] = "post_feedforward_layernorm"
        if spec.has_qk_norm:
            norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
        for name, theirs in norms.items():
            assert torch.equal(weights[f"{mine}.{name}.weight"], own[f"{layer}.{theirs}.weight"])
        assert_has_the_mlp(weights, own, mine, layer, spec.num_experts)


def assert_has_the_mlp(weights, own, mine: str, layer: str, num_experts: int | None):
    if num_experts is not None:
        assert torch.equal(weights[f"{mine}.router.weight"], own[f"{layer}.mlp.gate.weight"])
        for expert in range(num_experts):
            for name, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                assert torch.equal(
                    weights[f"{mine}.experts.{expert}.{name}.weight"], own[f"{layer}.mlp.experts.{theirs}"][expert]
                )
        return
    parts = [own.get(f"{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")]
    fused = own[f"{layer}.mlp.gate_up_proj.weight"] if parts[0] is None else torch.cat(parts)
    assert torch.equal(weights[f"{mine}.gate_up.weight"], fused)
    assert torch.equal(weights[f"{mine}.down.weight"], own[f"{layer}.mlp.down_proj.weight"])


@pytest.mark.parametrize("family", CONFIGS)
def test_family_is_read_whole(family, tmp_path):
    model, directory = saved(family, tmp_path / "model")
    target = read_target(directory)
    assert_has_the_models_weights(target, model)
    spec = target.spec
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (96, 64, 2)
    assert (spec.num_query_heads, spec.num_kv_heads, spec.max_positions) == (4, 2, 256)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert {name: getattr(spec, name) for name in EXPECTED[family]} == EXPECTED[family]
    num_tensors = 2 + (not spec.is_tied) + sum(name.startswith("layers.") for name in target.weights)
    assert len(target.weights) == num_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_their_dtype_and_are_mapped_not_copied(dtype, tmp_path):
    made("llama").to(dtype).save_pretrained(tmp_path / "model")
    target = read_target(tmp_path / "model")
    assert target.source_dtype is dtype
    assert {tensor.dtype for tensor in target.weights.values()} == {dtype}
    first, second = target.weights["norm.weight"], target.weights["norm.weight"]
    assert first.data_ptr() == second.data_ptr()


def test_shards_are_read_with_and_without_their_index(tmp_path):
    model, directory = saved("llama", tmp_path / "model", max_shard_size="100KB")
    index = directory / "model.safetensors.index.json"
    assert index.is_file()
    assert_has_the_models_weights(read_target(directory), model)
    index.unlink()
    assert_has_the_models_weights(read_target(directory), model)


def test_vendors_second_copy_beside_the_shards_is_not_read(tmp_path):
    model, directory = saved("mistral", tmp_path / "model")
    (directory / "consolidated.safetensors").write_bytes(b"another layout")
    assert_has_the_models_weights(read_target(directory), model)


def test_pickled_target_is_read_when_asked_for(tmp_path):
    model, directory = saved("llama", tmp_path / "model")
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    (directory / "training_args.bin").write_bytes(b"not weights")
    assert_has_the_models_weights(read_target(directory, allows_pickle=True), model)


def test_configuration_of_transformers_4_reads_alike(tmp_path):
    _, directory = saved("llama", tmp_path / "model")
    new = read_target(directory).spec
    config = json.loads((directory / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (directory / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": None}))
    assert read_target(directory).spec == new


def test_stored_lm_head_equal_to_the_embedding_is_tied_and_another_is_not(tmp_path):
    _, directory = saved("gemma2", tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    tied = read_target(directory)
    assert tied.spec.is_tied
    assert "lm_head.weight" not in tied.weights
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, file, {"format": "pt"})
    untied = read_target(directory)
    assert not untied.spec.is_tied
    assert torch.equal(untied.weights["lm_head.weight"], tensors["lm_head.weight"])


def test_end_tokens_come_from_the_generation_configuration(tmp_path):
    model = made("llama")
    model.generation_config.eos_token_id = [2, 7, 9]
    model.save_pretrained(tmp_path / "model")
    assert read_target(tmp_path / "model").spec.eos_token_ids == (2, 7, 9)


def test_tokenizer_directory_is_told_when_there_is_one(tmp_path):
    _, directory = saved("llama", tmp_path / "model")
    assert read_target(directory).tokenizer_dir is None
    (directory / "tokenizer.json").write_text("{}")
    assert read_target(directory).tokenizer_dir == directory


def test_gguf_equals_the_model_it_was_written_from(tmp_path):
    model = made("llama")
    file = tmp_path / "tiny.gguf"
    write_gguf(model, file)
    told: list[str] = []
    target = read_target(file, progress=told.append)
    assert_has_the_models_weights(target, model)
    assert target.source_dtype is torch.float32
    assert target.tokenizer_dir is None
    assert (target.spec.architecture, target.spec.max_positions) == ("LlamaForCausalLM", 256)
    assert told == ["dequantising tiny.gguf"]


def write_gguf(model: PreTrainedModel, file: Path):
    """llama.cpp's layout in float32: its own names, and query and key rows permuted for its rotary embedding."""
    config, own = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layer = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{theirs}": f"blk.{i}.{name}" for theirs, name in layer.items()}
    for theirs, name in names.items():
        tensor = own[f"{theirs}.weight"].numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-1])
        if heads is not None:
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
