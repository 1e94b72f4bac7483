"""Small random heads in their published layouts, and the means to write them as a head directory."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from furcate.builder.network.spec import DecoderSpec

TARGET = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=112,
    num_layers=12,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
)
HIDDEN, INNER, VOCAB, KEYS = 64, 112, 96, 32


@dataclass
class HeadFiles:
    """A head as it is written: config.json and named tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@pytest.fixture(scope="session")
def target() -> DecoderSpec:
    return TARGET


@pytest.fixture
def write_head(tmp_path: Path) -> Callable[..., Path]:
    """Writes a head directory, and returns it; a file name ending in .pt or .bin makes it a pickle."""

    def write(head: HeadFiles, name: str = "head", file: str = "model.safetensors") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(head.config))
        if file.endswith(".safetensors"):
            save_file({key: tensor.contiguous() for key, tensor in head.tensors.items()}, directory / file)
        else:
            torch.save(head.tensors, directory / file)
        return directory

    return write


@pytest.fixture
def random_tensor() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(shape, generator=generator)


def _layer(make: Callable[..., Tensor], prefix: str, inputs: int) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HIDDEN, inputs),
        "self_attn.k_proj": (KEYS, inputs),
        "self_attn.v_proj": (KEYS, inputs),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"{prefix}.{name}.weight": make(*shape) for name, shape in shapes.items()}


def _llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
    }


@pytest.fixture
def eagle3(random_tensor: Callable[..., Tensor]) -> HeadFiles:
    """SafeAILab's EAGLE-3 layout, 24 of 96 tokens; neighbouring tokens 5 and 6 are among them."""
    tensors = {"fc.weight": random_tensor(HIDDEN, 3 * HIDDEN), **_layer(random_tensor, "midlayer", 2 * HIDDEN)}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = random_tensor(HIDDEN)
    tensors["lm_head.weight"] = random_tensor(24, HIDDEN)
    ids = torch.tensor([2, 5, 6, *range(9, 93, 4)])
    tensors["d2t"] = ids - torch.arange(24)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    config = {**_llama_config(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 24}
    return HeadFiles(config, tensors)


@pytest.fixture
def eagle(random_tensor: Callable[..., Tensor]) -> HeadFiles:
    """SafeAILab's EAGLE-1/2 layout, fc with bias, own embedding."""
    tensors = {
        "embed_tokens.weight": random_tensor(VOCAB, HIDDEN),
        "fc.weight": random_tensor(HIDDEN, 2 * HIDDEN),
        "fc.bias": random_tensor(HIDDEN),
        **_layer(random_tensor, "layers.0", HIDDEN),
    }
    return HeadFiles({**_llama_config(), "bias": True}, tensors)


@pytest.fixture
def medusa(random_tensor: Callable[..., Tensor]) -> HeadFiles:
    """Medusa v0.1: three heads of two blocks with their own vocabulary heads."""
    tensors = {}
    for i in range(3):
        for j in range(2):
            tensors[f"{i}.{j}.linear.weight"] = random_tensor(HIDDEN, HIDDEN)
            tensors[f"{i}.{j}.linear.bias"] = random_tensor(HIDDEN)
        tensors[f"{i}.2.weight"] = random_tensor(VOCAB, HIDDEN)
    return HeadFiles({"medusa_num_heads": 3, "medusa_num_layers": 2}, tensors)


@pytest.fixture
def hydra(random_tensor: Callable[..., Tensor]) -> HeadFiles:
    """Hydra's grounded mlp layout: two heads of two blocks."""
    tensors = {}
    for i in range(2):
        wide = HIDDEN * (i + 2)
        for name, columns in ((f"{i}.0.linear", wide), (f"{i}.0.res_connection", wide), (f"{i}.1.linear", HIDDEN)):
            tensors[f"hydra_mlp.{name}.weight"] = random_tensor(HIDDEN, columns)
            tensors[f"hydra_mlp.{name}.bias"] = random_tensor(HIDDEN)
        tensors[f"hydra_lm_head.{i}.weight"] = random_tensor(VOCAB, HIDDEN)
        tensors[f"hydra_lm_head.{i}.bias"] = random_tensor(VOCAB)
    config = {"hydra_num_heads": 2, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    return HeadFiles(config, tensors)


@pytest.fixture
def hydra_prefix(hydra: HeadFiles, random_tensor: Callable[..., Tensor]) -> HeadFiles:
    """The same heads behind a prefix layer: a Dropout before each module doubles the stored indices."""
    tensors = {}
    for name, tensor in hydra.tensors.items():
        kind, head, rest = name.split(".", 2)
        if kind == "hydra_lm_head":
            tensors[f"{kind}.{head}.1.{rest}"] = tensor
        else:
            block, rest = rest.split(".", 1)
            tensors[f"{kind}.{head}.{2 * int(block) + 1}.{rest}"] = tensor
    prefix = "prefix_embeding_layer"
    tensors |= _layer(random_tensor, f"{prefix}.layers.0", HIDDEN)
    tensors[f"{prefix}.layers.0.input_layernorm.weight"] = random_tensor(HIDDEN)
    tensors[f"{prefix}.norm.weight"] = random_tensor(HIDDEN)
    tensors[f"{prefix}.embed_tokens.weight"] = random_tensor(VOCAB, HIDDEN)
    return HeadFiles({**hydra.config, "hydra_head_arch": "prefix-mlp"}, tensors)
