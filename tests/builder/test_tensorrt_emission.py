"""What is emitted for TensorRT computes what the torch executor computes: float32, native attention, evaluated layer by layer.

Tolerance: 1e-3 on logits of size about 10; both sides compute in float32 and sum in another order.
"""

import pytest
import torch
from emitted_networks import NUM_SLOTS, TargetTwice, chain, random_tree
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from furcate.builder.checkpoints.target import read_target

VOCAB = 120
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 64,
    },
}  # fmt: skip
FAMILIES = {
    "llama-untied": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True),
    **{f"rope-{name}": LlamaConfig(**SIZES, rope_parameters=rope) for name, rope in ROPES.items()},
    "mistral-window": MistralConfig(**SIZES, sliding_window=7, head_dim=16),
    "qwen2-qkv-bias": Qwen2Config(**SIZES),
    "qwen3-qk-norm": Qwen3Config(**SIZES, head_dim=32),
    "gemma2-softcap": Gemma2Config(**SIZES, head_dim=16, sliding_window=7, query_pre_attn_scalar=16),
    "gemma3-local-rope": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=7, query_pre_attn_scalar=16),
    "phi3-fused": Phi3Config(**SIZES, pad_token_id=0),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}


def target_twice(config, path, taps=()) -> TargetTwice:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a missing bias or norm
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(path)
    target = read_target(path)
    return TargetTwice(target.spec, {name: target.weights[name].float() for name in target.weights}, taps)


def check(both: TargetTwice, nodes, cache_lengths, logit_rows=None) -> None:
    expected, evaluated = both.run(nodes, cache_lengths, logit_rows)
    assert expected.logits.abs().max() > 0.1, "logits of nothing"
    torch.testing.assert_close(evaluated["logits"], expected.logits, atol=1e-3, rtol=0)
    if expected.features is not None:
        torch.testing.assert_close(evaluated["features"], expected.features, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_logits_equal_the_torch_executor_for_a_prompt_chunk_a_chain_and_a_random_tree(name, tmp_path):
    both = target_twice(FAMILIES[name], tmp_path)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (2, 40), generator=generator)
    check(both, chain(ids[:, :33]), torch.tensor([0, 0]))  # a prompt chunk of more than one mask word
    check(both, chain(ids[:, 33:]), torch.tensor([33, 20]))  # a chain; rows stand at different lengths
    check(both, random_tree(2, 40, VOCAB, seed=2), torch.tensor([40, 27]))  # a tree of two mask words
    check(both, random_tree(2, 1, VOCAB, seed=3), torch.tensor([41, 28]))  # plain decoding


@torch.inference_mode()
def test_features_and_chosen_rows_equal_the_torch_executor(tmp_path):
    both = target_twice(FAMILIES["llama-untied"], tmp_path, taps=(0, 1, 2))
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
    check(both, chain(ids), torch.tensor([0, 0]), logit_rows=torch.tensor([[8], [3]]))


@torch.inference_mode()
def test_a_cache_is_filled_to_its_last_slot(tmp_path):
    both = target_twice(FAMILIES["llama-tied"], tmp_path)
    tree = random_tree(2, 4, VOCAB, seed=5)
    check(both, tree, torch.tensor([NUM_SLOTS - 4, 0]))


@pytest.mark.slow
@torch.inference_mode()
def test_logits_of_the_example_model_equal_the_torch_executor(example_model):
    target = read_target(example_model)
    both = TargetTwice(target.spec, dict(target.weights), (2, target.spec.num_layers // 2, target.spec.num_layers - 3))
    ids = torch.randint(2, 4000, (2, 60), generator=torch.Generator().manual_seed(1))
    lengths = [torch.tensor([0, 0]), torch.tensor([50, 41]), torch.tensor([60, 50])]
    for nodes, cache_lengths in zip(
        (chain(ids[:, :50]), chain(ids[:, 50:]), random_tree(2, 40, 4000, 2)), lengths, strict=True
    ):
        expected, evaluated = both.run(nodes, cache_lengths)
        torch.testing.assert_close(evaluated["logits"], expected.logits, atol=1e-3, rtol=0)
        # The residual stream has entries of several thousands: relative, 1e-5 of the largest.
        atol = 1e-5 * float(expected.features.abs().max())
        torch.testing.assert_close(evaluated["features"], expected.features, atol=atol, rtol=0)
