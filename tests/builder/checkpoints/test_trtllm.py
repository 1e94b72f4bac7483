"""TensorRT-LLM checkpoints read as the Hugging Face ones they were converted from, for one rank and for two.

The checkpoints are written here by the rules of TensorRT-LLM's convert scripts (models/llama/convert.py): q, k and v fused rank
by rank, gate_proj under `mlp.fc`, up_proj under `mlp.gate`.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.checkpoints.target import read_target
from furcate.builder.errors import CheckpointError

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def part(tensor: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(ranks, dim=dim)[rank].contiguous()


def convert(source, output, ranks: int) -> None:
    """What the convert scripts write for a Llama-like model."""
    weights, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    output.mkdir()
    for rank in range(ranks):
        theirs = {
            "transformer.vocab_embedding.weight": weights["model.embed_tokens.weight"],
            "transformer.ln_f.weight": weights["model.norm.weight"],
        }
        if "lm_head.weight" in weights:
            theirs["lm_head.weight"] = part(weights["lm_head.weight"], rank, ranks)
        for layer in range(config["num_hidden_layers"]):
            hf, name = f"model.layers.{layer}", f"transformer.layers.{layer}"
            for kind in ("weight", "bias"):
                parts = [weights.get(f"{hf}.self_attn.{p}_proj.{kind}") for p in "qkv"]
                if parts[0] is not None:
                    theirs[f"{name}.attention.qkv.{kind}"] = torch.cat([part(p, rank, ranks) for p in parts])
            theirs[f"{name}.attention.dense.weight"] = part(weights[f"{hf}.self_attn.o_proj.weight"], rank, ranks, 1)
            theirs[f"{name}.mlp.fc.weight"] = part(weights[f"{hf}.mlp.gate_proj.weight"], rank, ranks)
            theirs[f"{name}.mlp.gate.weight"] = part(weights[f"{hf}.mlp.up_proj.weight"], rank, ranks)
            theirs[f"{name}.mlp.proj.weight"] = part(weights[f"{hf}.mlp.down_proj.weight"], rank, ranks, 1)
            theirs[f"{name}.input_layernorm.weight"] = weights[f"{hf}.input_layernorm.weight"]
            theirs[f"{name}.post_layernorm.weight"] = weights[f"{hf}.post_attention_layernorm.weight"]
            for p in "qk":
                if f"{hf}.self_attn.{p}_norm.weight" in weights:
                    theirs[f"{name}.attention.{p}_layernorm.weight"] = weights[f"{hf}.self_attn.{p}_norm.weight"]
        save_file(theirs, output / f"rank{rank}.safetensors")
    rope = config["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    (output / "config.json").write_text(json.dumps({
        "architecture": config["architectures"][0], "dtype": "float32", "norm_epsilon": config["rms_norm_eps"],
        **{name: config[name] for name in SIZES},
        "head_size": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "hidden_act": "silu", "attn_bias": False, "rotary_base": rope["rope_theta"],
        "rotary_scaling": None if scaling["rope_type"] == "default" else scaling,
        "tie_word_embeddings": config["tie_word_embeddings"], "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
        "quantization": {"quant_algo": None},
    }))  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_target_reads_as_its_source(name, ranks, tmp_path):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)  # biases and norms that differ row by row
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "trtllm", ranks)
    source, converted = read_target(tmp_path / "hf"), read_target(tmp_path / "trtllm")
    assert converted.spec == source.spec
    assert set(converted.weights) == set(source.weights)
    for key in source.weights:
        torch.testing.assert_close(converted.weights[key], source.weights[key], rtol=0, atol=0)


def medusa(tmp_path, target) -> None:
    tmp_path.mkdir()
    size, vocabulary = target.spec.hidden_size, target.spec.vocab_size
    generator = torch.Generator().manual_seed(4)
    for rank in range(2):
        theirs = {}
        for head in range(3):
            prefix = f"medusa_heads.{head}"
            theirs[f"{prefix}.medusa_layers.0.linear.weight"] = torch.randn(size // 2, size, generator=generator)
            theirs[f"{prefix}.medusa_layers.0.linear.bias"] = torch.randn(size // 2, generator=generator)
            theirs[f"{prefix}.lm_head.weight"] = torch.randn(vocabulary // 2, size, generator=generator)
        save_file(theirs, tmp_path / f"rank{rank}.safetensors")
    config = {
        "architecture": "MedusaForCausalLM", "num_medusa_heads": 3, "num_medusa_layers": 1, "mapping": {"tp_size": 2},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))


def test_medusa_heads_of_two_ranks_are_put_together(tiny_target, tmp_path):
    target = read_target(tiny_target)
    medusa(tmp_path / "trtllm", target)
    head = read_head(tmp_path / "trtllm", target=target.spec)
    assert (head.spec.num_heads, head.spec.num_blocks, head.spec.owns_lm_head) == (3, 1, True)
    parts = [load_file(tmp_path / "trtllm" / f"rank{rank}.safetensors") for rank in range(2)]
    stored = torch.cat([part["medusa_heads.1.medusa_layers.0.linear.weight"] for part in parts])
    torch.testing.assert_close(head.weights["heads.1.blocks.0.weight"], stored, rtol=0, atol=0)


def eagle(source, output, ranks: int) -> None:
    """What examples/eagle/convert_checkpoint.py adds for an EAGLE head in Hugging Face's layout, twice, for two draft passes."""
    weights, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    for rank in range(ranks):
        file = output / f"rank{rank}.safetensors"
        theirs = load_file(file)
        for net in range(2):
            name, layer = f"eagle_nets.{net}.drafter", "layers.0"
            theirs[f"{name}.fc.weight"] = part(weights["fc.weight"], rank, ranks)
            theirs[f"{name}.fc.bias"] = part(weights["fc.bias"], rank, ranks)
            projections = [part(weights[f"{layer}.self_attn.{p}_proj.weight"], rank, ranks) for p in "qkv"]
            theirs[f"{name}.{layer}.attention.qkv.weight"] = torch.cat(projections)
            rows = {"attention.dense": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}
            for ours, hf in rows.items():
                theirs[f"{name}.{layer}.{ours}.weight"] = part(weights[f"{layer}.{hf}.weight"], rank, ranks, 1)
            columns = {"mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj"}
            for ours, hf in columns.items():
                theirs[f"{name}.{layer}.{ours}.weight"] = part(weights[f"{layer}.{hf}.weight"], rank, ranks)
            theirs[f"{name}.{layer}.post_layernorm.weight"] = weights[f"{layer}.post_attention_layernorm.weight"]
            theirs[f"{name}.vocab_embedding.weight"] = theirs["transformer.vocab_embedding.weight"].clone()
            theirs[f"eagle_nets.{net}.lm_head.weight"] = theirs["lm_head.weight"].clone()
        save_file({name: tensor.clone() for name, tensor in theirs.items()}, file)
    file = output / "config.json"
    base = json.loads(file.read_text())
    shared = {
        name: base[name] for name in ("dtype", "hidden_act", "rotary_base", "rotary_scaling", "mapping", "quantization")
    }
    own = {
        "architecture": "LlamaForCausalLM", **shared, "norm_epsilon": config["rms_norm_eps"],
        **{name: config[name] for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings",
        )},
    }  # fmt: skip
    file.write_text(
        json.dumps({**base, "architecture": "EagleForCausalLM", "num_eagle_layers": 2, "eagle_net_config": own})
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_eagle_checkpoint_is_its_target_and_its_head(ranks, tiny_target, tiny_heads, tmp_path):
    convert(tiny_target, tmp_path / "trtllm", ranks)
    eagle(tiny_heads["eagle"], tmp_path / "trtllm", ranks)
    source, target = read_target(tiny_target), read_target(tmp_path / "trtllm")
    assert target.spec == replace(
        source.spec, bos_token_id=target.spec.bos_token_id, eos_token_ids=target.spec.eos_token_ids
    )
    expected = read_head(tiny_heads["eagle"], target=target.spec)
    head = read_head(tmp_path / "trtllm", target=target.spec)
    embedding = source.weights["embed_tokens.weight"]
    assert head.spec == replace(expected.spec, owns_embedding=True)
    assert set(head.weights) == {*expected.weights, "embed_tokens.weight"}
    for name in head.weights:
        stored = embedding if name == "embed_tokens.weight" else expected.weights[name]
        torch.testing.assert_close(head.weights[name], stored, rtol=0, atol=0)


def test_a_checkpoint_without_heads_is_no_head(tiny_target, tmp_path):
    convert(tiny_target, tmp_path / "trtllm", 1)
    with pytest.raises(CheckpointError, match="of LlamaForCausalLM without Medusa heads or an EAGLE layer; as --head"):
        read_head(tmp_path / "trtllm", target=read_target(tiny_target).spec)


REFUSALS = [
    (
        {"architecture": "GPTForCausalLM"},
        "is a TensorRT-LLM checkpoint of GPTForCausalLM; supported are LlamaForCausalLM",
    ),
    ({"quantization": {"quant_algo": "W4A16_AWQ"}}, r"is quantised \(W4A16_AWQ\)"),
    ({"mapping": {"tp_size": 1, "pp_size": 2}}, r"is divided by layers \(pp_size\)"),
    ({"mapping": {"tp_size": 3}}, "rank1.safetensors does not exist"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS)
def test_what_cannot_be_read_is_refused_in_one_sentence(changes, sentence, tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "trtllm", 1)
    file = tmp_path / "trtllm" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=sentence):
        read_target(tmp_path / "trtllm")
