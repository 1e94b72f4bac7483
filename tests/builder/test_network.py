"""The network against transformers: logits in float32, for a prompt in chunks, a chain and a tree, every family.

Tolerance: both sides compute in float32 and sum in another order; 1e-4 on logits of size about 10 is a few hundred ulps.
"""

import json
from pathlib import Path

import pytest
import torch
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
from furcate.builder.network.decoder import run_target
from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.rope import rope_table
from furcate.builder.ops.torch import RopeTables, TorchOps
from furcate.decoding.tree import pack_mask, tree_from_parents
from furcate.plugins.tree_attention.spec import RopeTable

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    **{f"llama-{name}": LlamaConfig(**SIZES, rope_parameters=rope) for name, rope in ROPES.items()},
    "mistral-window": MistralConfig(**SIZES, sliding_window=24, head_dim=16),
    "qwen2-bias": Qwen2Config(**SIZES),
    "qwen3-qk-norm": Qwen3Config(**SIZES, head_dim=32),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=24, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=24, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, **MOE),
}
PROMPT_LENGTH, PAGE_SIZE = 90, 16


class Network:
    """A target loaded for its tests: one sequence, pages in a scrambled order."""

    def __init__(self, path, num_pages: int = 32, num_positions: int = 256) -> None:
        target = read_target(path)
        self.spec = spec = target.spec
        pool = torch.zeros(spec.num_layers, num_pages, 2, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        local = RopeTable(*rope_table(spec, num_positions, spec.local_rope)) if spec.local_rope is not None else None
        rope = RopeTables(everywhere=RopeTable(*rope_table(spec, num_positions)), local=local)
        weights = {name: target.weights[name].float() for name in target.weights}
        self.ops = TorchOps(weights, rope, pool, spec.has_unit_offset_norm)
        if spec.is_tied:
            self.ops.tie_lm_head()
        self.page_table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).int()[None]

    def run(self, token_ids, length: int, positions=None, tree_mask=None, **kwargs):
        if positions is None:
            positions = torch.arange(length, length + token_ids.shape[1])[None]
        inputs = PassInputs(
            token_ids=token_ids,
            positions=positions.int(),
            tree_mask=tree_mask,
            cache_lengths=torch.tensor([length], dtype=torch.int32),
            page_table=self.page_table,
        )
        return run_target(self.ops, self.spec, inputs, **kwargs)


def random_tree(num_nodes: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[0, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes))]])
    ids = torch.randint(2, 150, (1, num_nodes), generator=generator)
    return tree_from_parents(ids, parents, torch.tensor([num_nodes]), max_depth=num_nodes)


def check_against(model, network: Network, prompt: torch.Tensor, chunks: list[int], tree, atol: float) -> None:
    """The prompt in chunks, then a tree whose every path is checked against the whole text given to transformers."""
    reference = model(prompt).logits
    start = 0
    for size in chunks:
        logits = network.run(prompt[:, start : start + size], start).logits
        torch.testing.assert_close(logits, reference[:, start : start + size], atol=atol, rtol=0)
        start += size
    assert start == prompt.shape[1]
    positions = start + tree.depths
    logits = network.run(tree.token_ids, start, positions, pack_mask(tree.ancestor_mask)).logits
    for node in range(tree.token_ids.shape[1]):
        path = tree.token_ids[0, tree.ancestor_mask[0, node].nonzero().squeeze(1)]
        whole = torch.cat([prompt, path[None]], dim=1)
        torch.testing.assert_close(logits[0, node], model(whole).logits[0, -1], atol=atol, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_logits_equal_transformers_for_chunks_and_trees(name, tmp_path):
    torch.manual_seed(5)
    config = FAMILIES[name]
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    # Rotary tables of scalings that depend on length are frozen at the longest text; take that as transformers' too.
    network = Network(tmp_path, num_positions=256)
    prompt = torch.randint(2, 150, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(6))
    check_against(model, network, prompt, [50, 39, 1], random_tree(9, 1), atol=1e-4)


@torch.inference_mode()
def test_logits_of_the_example_model_equal_transformers_in_chunks_as_a_tree_and_as_a_chain(example_model):
    """A prompt of 300 tokens, then its own likely continuations: the tokens a tree really holds."""
    model = AutoModelForCausalLM.from_pretrained(example_model, dtype=torch.float32).eval()
    network = Network(example_model, num_positions=512)
    lines = (Path(__file__).parents[2] / "examples" / "prompts.jsonl").read_text().splitlines()
    prompt = torch.tensor([[token for line in lines for token in json.loads(line)["input_ids"]][:300]])
    tree = likely_tree(model, prompt, parents=[0, 0, 0, 1, 1, 3])
    check_against(model, network, prompt[:, :-1], [128, 128, 43], tree, atol=1e-4)
    chain = likely_tree(model, prompt, parents=[0, 0, 1, 2, 3])
    as_tree = network.run(chain.token_ids, 299, 299 + chain.depths, pack_mask(chain.ancestor_mask)).logits
    as_chunk = network.run(chain.token_ids, 299).logits
    torch.testing.assert_close(as_tree, as_chunk, atol=1e-4, rtol=0)


def likely_tree(model, prompt: torch.Tensor, parents: list[int]):
    """A tree below the prompt's last token; node n is the next most probable child of its parent not taken yet."""
    paths = [prompt]
    taken = [0] * len(parents)
    for parent in parents[1:]:
        child = model(paths[parent]).logits[:, -1].topk(taken[parent] + 1).indices[:, -1:]
        taken[parent] += 1
        paths.append(torch.cat([paths[parent], child], dim=1))
    ids = torch.stack([path[0, -1] for path in paths])[None]
    return tree_from_parents(ids, torch.tensor([parents]), torch.tensor([len(parents)]), max_depth=len(parents))


@torch.inference_mode()
def test_features_are_the_residual_stream_entering_a_layer_and_the_final_normed_state(tmp_path):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]).eval()
    model.save_pretrained(tmp_path)
    prompt = torch.arange(2, 40)[None]
    hidden = model(prompt, output_hidden_states=True).hidden_states
    features = Network(tmp_path).run(prompt, 0, feature_layers=(1, 2, 3)).features
    # transformers' last entry is the state after the final norm, as tap num_layers is here.
    torch.testing.assert_close(features, torch.cat([hidden[1], hidden[2], hidden[3]], dim=-1), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_logits_of_chosen_rows_are_those_rows_of_all_logits(tmp_path):
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(FAMILIES["qwen2-bias"]).save_pretrained(tmp_path)
    network = Network(tmp_path)
    prompt = torch.arange(2, 30)[None]
    everything = network.run(prompt, 0).logits
    chosen = network.run(prompt, 0, logit_rows=torch.tensor([[27, 3]])).logits
    torch.testing.assert_close(chosen, everything[:, [27, 3]], atol=1e-5, rtol=0)
