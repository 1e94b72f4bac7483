"""Heads that only the decoding tests need: Hydra's two architectures, and an EAGLE-3 head with a norm for each tap."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType
from furcate.builder.engine import read_engine
from furcate.decoding.executors.torch import TorchExecutor

NUM_HYDRA_HEADS = 3


def random_tensors(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator) * 0.2


def hydra_tensors(hidden: int, vocabulary: int, *, has_prefix: bool) -> dict[str, Tensor]:
    """Grounded heads of two blocks under zankner/Hydra's names, without the prefix layer's own tensors."""
    random = random_tensors(11)
    tensors = {}
    for i in range(NUM_HYDRA_HEADS):
        first, second = ("1", "3") if has_prefix else ("0", "1")
        wide = hidden * (i + 2)
        lm_head = f"hydra_lm_head.{i}.1" if has_prefix else f"hydra_lm_head.{i}"
        shapes = {
            f"hydra_mlp.{i}.{first}.linear": (hidden, wide),
            f"hydra_mlp.{i}.{first}.res_connection": (hidden, wide),
            f"hydra_mlp.{i}.{second}.linear": (hidden, hidden),
            lm_head: (vocabulary, hidden),
        }
        for name, shape in shapes.items():
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = random(*shape), random(shape[0])
    return tensors


def prefix_tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """The prefix layer: a Llama of one layer, of the target's shape."""
    random = random_tensors(12)
    layer, hidden = "prefix_embeding_layer.layers.0", config.hidden_size
    kv = config.num_key_value_heads * config.head_dim
    return {
        "prefix_embeding_layer.norm.weight": 1 + random(hidden),
        f"{layer}.input_layernorm.weight": 1 + random(hidden),
        f"{layer}.post_attention_layernorm.weight": 1 + random(hidden),
        f"{layer}.self_attn.q_proj.weight": random(hidden, hidden),
        f"{layer}.self_attn.k_proj.weight": random(kv, hidden),
        f"{layer}.self_attn.v_proj.weight": random(kv, hidden),
        f"{layer}.self_attn.o_proj.weight": random(hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": random(config.intermediate_size, hidden),
        f"{layer}.mlp.up_proj.weight": random(config.intermediate_size, hidden),
        f"{layer}.mlp.down_proj.weight": random(hidden, config.intermediate_size),
    }


def save_head(path: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def more_heads(
    tiny_target: Path, tiny_heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Head directories: hydra, hydra-prefix, eagle3-tap-norms."""
    root = tmp_path_factory.mktemp("more-heads")
    target = LlamaConfig.from_pretrained(tiny_target)
    config = {"hydra_num_heads": NUM_HYDRA_HEADS, "hydra_num_layers": 2, "grounded_heads": True}
    sizes = (target.hidden_size, target.vocab_size)
    mlp = hydra_tensors(*sizes, has_prefix=False)
    prefix = hydra_tensors(*sizes, has_prefix=True) | prefix_tensors(target)
    random = random_tensors(13)
    norms = {f"fc_norm.{tap}.weight": 1 + random(target.hidden_size) for tap in range(3)}
    eagle3 = load_file(tiny_heads["eagle3"] / "model.safetensors") | norms
    eagle3_config = json.loads((tiny_heads["eagle3"] / "config.json").read_text()) | {"fc_norm": True}
    return {
        "hydra": save_head(root / "hydra", mlp, config | {"hydra_head_arch": "mlp"}),
        "hydra-prefix": save_head(root / "hydra-prefix", prefix, config | {"hydra_head_arch": "prefix-mlp"}),
        "eagle3-tap-norms": save_head(root / "eagle3-tap-norms", eagle3, eagle3_config),
    }


@pytest.fixture(scope="session")
def engine_with(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds (once per head and settings) a float32 engine of the tiny target with the head in a directory."""
    built: dict[tuple, Path] = {}
    root = tmp_path_factory.mktemp("engines-with")

    def build(head: Path, **settings: object) -> Path:
        key = (head, *sorted(settings.items()))
        if key not in built:
            settings = {"dtype": DataType.FLOAT32, "max_context_tokens": 400, "adaptive": False, **settings}
            output = root / f"engine{len(built)}"
            build_engine(BuildConfig(target=tiny_target, head=head, output=output, **settings))
            built[key] = output
        return built[key]

    return build


@pytest.fixture(scope="session")
def noisy_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with noise in every matrix: a draft model that is often, not always, right. It has no tokenizer."""
    path = tmp_path_factory.mktemp("noisy") / "model"
    path.mkdir()
    random = random_tensors(14)
    weights = {
        name: tensor + 0.2 * tensor.std() * random(*tensor.shape) if tensor.ndim == 2 else tensor
        for name, tensor in load_file(tiny_target / "model.safetensors").items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((tiny_target / "config.json").read_text())
    return path


@pytest.fixture(scope="session")
def model_executors(
    tiny_target: Path, noisy_target: Path, engine_with: Callable[..., Path]
) -> dict[str, TorchExecutor]:
    """The tiny target with itself, and with a noisy copy, as the draft model."""
    drafters = {"itself": tiny_target, "noisy": noisy_target}
    return {
        name: TorchExecutor(read_engine(engine_with(path, max_pool_tokens=65536))) for name, path in drafters.items()
    }
