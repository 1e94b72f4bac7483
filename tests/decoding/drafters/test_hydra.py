"""Hydra heads against their formula, written out with torch and transformers from the stored tensors."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaModel

from furcate.builder.engine import read_engine
from furcate.decoding.drafters.hydra import HydraProposer
from furcate.decoding.drafters.proposer import Committed, DraftRows
from furcate.decoding.executors.torch import TorchExecutor

# Two float32 implementations that sum in different orders.
TOLERANCE = 2e-5
NUM_TOKENS = 7


def head_formula(tensors, has_prefix, i, hidden, embeddings):
    """Head i: x = W_r cat + b_r + silu(W cat + b), then x + silu(W2 x + b2), then the vocabulary."""

    def linear(name, x):
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    first, second = (1, 3) if has_prefix else (0, 1)
    wide = torch.cat([hidden, *embeddings[: i + 1]])
    x = linear(f"hydra_mlp.{i}.{first}.res_connection", wide) + F.silu(linear(f"hydra_mlp.{i}.{first}.linear", wide))
    x = x + F.silu(linear(f"hydra_mlp.{i}.{second}.linear", x))
    return linear(f"hydra_lm_head.{i}.1" if has_prefix else f"hydra_lm_head.{i}", x)


def prefixed(tensors, target_dir, features):
    """The prefix layer of transformers, on hidden states instead of embeddings."""
    config = LlamaConfig.from_pretrained(target_dir)
    config.num_hidden_layers = 1
    model = LlamaModel(config)
    own = {
        name.removeprefix("prefix_embeding_layer."): tensor
        for name, tensor in tensors.items()
        if name.startswith("prefix_embeding_layer.")
    }
    model.load_state_dict({**own, "embed_tokens.weight": model.embed_tokens.weight})
    with torch.no_grad():
        return model(inputs_embeds=features).last_hidden_state


@pytest.mark.parametrize("name", ["hydra", "hydra-prefix"])
def test_hydra_heads_equal_their_formula_along_two_paths(name, more_heads, engine_with, tiny_target):
    executor = TorchExecutor(read_engine(engine_with(more_heads[name], tree="chain:3")))
    tensors = load_file(more_heads[name] / "model.safetensors")
    embedding = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(1, NUM_TOKENS, 64, generator=generator)
    page_table = torch.tensor([[2]], dtype=torch.int32)
    proposer = HydraProposer(executor)
    states = None
    # Committed in two pieces, as in decoding: a prefix layer reads its cache.
    for start, end in ((0, 4), (4, NUM_TOKENS)):
        states = proposer.observe(
            Committed(
                features=features[:, start:end],
                first_ids=torch.tensor([9]),
                next_ids=torch.full((1, end - start), 9),
                counts=torch.tensor([end - start]),
                cache_lengths=torch.tensor([start], dtype=torch.int32),
                page_table=page_table,
            )
        )
    rows = DraftRows(
        states=states,
        root_ids=torch.tensor([17]),
        cache_lengths=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        page_table=page_table,
    )
    draft = proposer.start(rows)
    level_logits = [draft.logits]
    draft.descend(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[40, 41]]))
    level_logits.append(draft.logits)
    # Children of the second node come first: paths must follow their parents, not their places.
    draft.descend(torch.tensor([[1, 0]]), torch.tensor([[50, 51]]))
    level_logits.append(draft.logits)

    has_prefix = name == "hydra-prefix"
    hidden = prefixed(tensors, tiny_target, features)[0, -1] if has_prefix else features[0, -1]
    for depth, paths in enumerate([[(17,)], [(17, 40), (17, 41)], [(17, 41, 50), (17, 40, 51)]]):
        for place, path in enumerate(paths):
            expected = head_formula(tensors, has_prefix, depth, hidden, [embedding[token] for token in path])
            torch.testing.assert_close(level_logits[depth][0, place], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_each_tap_is_normed_on_its_own_before_fc(more_heads, engine_with):
    directory = more_heads["eagle3-tap-norms"]
    executor = TorchExecutor(read_engine(engine_with(directory)))
    tensors = load_file(directory / "model.safetensors")
    features = torch.randn(1, 3, 3 * 64, generator=torch.Generator().manual_seed(3)) * 4
    normed = [
        tap / (tap.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"fc_norm.{k}.weight"]
        for k, tap in enumerate(features.split(64, dim=-1))
    ]
    expected = F.linear(torch.cat(normed, -1), tensors["fc.weight"])
    torch.testing.assert_close(executor.fuse_features(features), expected, atol=TOLERANCE, rtol=TOLERANCE)
