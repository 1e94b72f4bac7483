"""Heads emitted for TensorRT against the torch executor's: every kind, prompt rows, then a tree drafted level by level.

Tolerance: 1e-3 on logits of size about 10; both sides compute in float32 and sum in another order.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from emitted_networks import NUM_SLOTS, caches_of, chain, emission_context, feed, new_builder, random_tree, rope_tables
from network_interpreter import NetworkInterpreter

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.checkpoints.target import read_target
from furcate.builder.network.heads import (
    eagle_fuse,
    eagle_layer,
    eagle_logits,
    hydra_logits,
    hydra_prefix,
    medusa_logits,
)
from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.spec import HeadKind, HeadSpec
from furcate.builder.ops.torch import TorchOps
from furcate.builder.tensorrt_networks import EMBEDDING, LM_HEAD, emit_head
from furcate.decoding.tree import pack_mask, tree_from_parents

BATCH, PAGE_SIZE = 2, 16


class HeadTwice:
    """A head of the tiny target: torch's operations, and the emitted networks with the target's tables as inputs."""

    def __init__(self, target, head) -> None:
        self.spec = head.spec
        self.tables = {EMBEDDING: target.weights[EMBEDDING].float(), LM_HEAD: target.weights[LM_HEAD].float()}
        weights = {name: head.weights[name] for name in head.weights if name != "draft_token_ids"}
        weights = {name: tensor.float() for name, tensor in weights.items()}
        borrowed = {name: table for name, table in self.tables.items() if name not in weights}
        decoder = head.spec.decoder
        pool, rope = None, None
        if decoder is not None:
            rope = rope_tables(decoder)
            pool = torch.zeros(1, BATCH * NUM_SLOTS // PAGE_SIZE, 2, PAGE_SIZE, decoder.num_kv_heads, decoder.head_dim)
        self.ops = TorchOps({**borrowed, **weights}, rope, pool)
        shapes = {name: tuple(table.shape) for name, table in self.tables.items()}
        context = emission_context(decoder or target.spec, shared_tables=shapes)
        networks = emit_head(new_builder(context.tensorrt), context, head.spec, weights)
        self.networks = networks
        self.emitted = {n.name: NetworkInterpreter(context.tensorrt.module, n.network) for n in networks}
        self.caches = caches_of(self.emitted["head"], BATCH) if "head" in self.emitted else {}

    def wanted_tables(self, name: str) -> dict[str, torch.Tensor]:
        network = self.emitted[name].network
        names = [network.get_input(index).name for index in range(network.num_inputs)]
        return {table: self.tables[table] for table in self.tables if table in names}

    def layer(self, hidden: torch.Tensor, inputs: PassInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The next hidden states of both, asserted equal, and the torch ones returned."""
        embedding = self.ops.embedding("embed_tokens", inputs.token_ids)
        expected = eagle_layer(self.ops, self.spec, hidden, embedding, inputs)
        offset = torch.tensor([inputs.node_offset], dtype=torch.int32)
        given = {"hidden": hidden, "node_offset": offset, **feed(inputs), **self.caches, **self.wanted_tables("head")}
        evaluated = self.emitted["head"](given)
        self.caches = {name: evaluated[f"{name}.out"] for name in self.caches}
        close(evaluated["next_hidden"], expected)
        logits = eagle_logits(self.ops, self.spec, expected)
        close(self.emitted["logits"]({"hidden": expected, **self.wanted_tables("logits")})["logits"], logits)
        return expected, logits


def close(evaluated, expected) -> None:
    assert expected.abs().max() > 0.1, "nothing is compared"
    torch.testing.assert_close(evaluated, expected, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def target(tiny_target):
    return read_target(tiny_target)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@torch.inference_mode()
def test_an_eagle_head_equals_the_torch_executor_on_committed_rows_and_on_drafted_levels(kind, target, tiny_heads):
    head = read_head(tiny_heads[kind], target=target.spec)
    both = HeadTwice(target, head)
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(BATCH, 34, head.spec.target_hidden_size * len(head.spec.feature_layers), generator=generator)
    hidden = eagle_fuse(both.ops, head.spec, features)
    if kind == "eagle3":
        close(both.emitted["fuse"]({"features": features})["hidden"], hidden)
    ids = torch.randint(2, 250, (BATCH, 34), generator=generator)
    states, _ = both.layer(hidden, chain(ids).inputs(torch.tensor([0, 0])))
    lengths = torch.tensor([34, 21])
    # Three levels of a tree, each behind the nodes already drafted.
    tree = random_tree(BATCH, 9, 250, seed=8)
    whole = tree_from_parents(tree.token_ids, tree.parents, torch.full((BATCH,), 9), max_depth=9)
    hidden = states[:, -9:]
    for first, last in ((0, 2), (2, 6), (6, 9)):
        inputs = PassInputs(
            token_ids=tree.token_ids[:, first:last].int(),
            positions=(lengths[:, None] + whole.depths[:, first:last]).int(),
            tree_mask=pack_mask(whole.ancestor_mask)[:, first:last],
            cache_lengths=lengths.int(),
            page_table=torch.arange(BATCH * NUM_SLOTS // PAGE_SIZE).int().view(BATCH, -1),
            node_offset=first,
        )
        both.layer(hidden[:, first:last], inputs)


@torch.inference_mode()
def test_medusa_heads_equal_the_torch_executor(target, tiny_heads):
    head = read_head(tiny_heads["medusa"], target=target.spec)
    both = HeadTwice(target, head)
    hidden = torch.randn(BATCH, 1, head.spec.hidden_size, generator=torch.Generator().manual_seed(7))
    evaluated = both.emitted["head"]({"hidden": hidden, **both.wanted_tables("head")})
    for i, logits in enumerate(medusa_logits(both.ops, head.spec, hidden)):
        close(evaluated[f"logits.{i}"], logits)


def test_a_head_that_borrows_holds_no_copy_of_the_targets_tables(target, tiny_heads):
    head = read_head(tiny_heads["eagle"], target=target.spec)
    both = HeadTwice(target, head)
    assert set(both.wanted_tables("head")) == {EMBEDDING}
    assert set(both.wanted_tables("logits")) == {LM_HEAD}
    assert not {EMBEDDING, LM_HEAD} & {name for network in both.networks for name in network.graph.weight_names}
    assert "layers.0.qkv.weight" in both.networks[0].graph.weight_names


@pytest.mark.parametrize("has_prefix", [False, True])
@torch.inference_mode()
def test_hydra_heads_equal_the_torch_executor(target, has_prefix):
    """Weights are random: every depth's path, and the prefix layer on committed rows."""
    generator = torch.Generator().manual_seed(9)
    decoder = replace(target.spec, num_layers=1, is_tied=False) if has_prefix else None
    spec = HeadSpec(
        kind=HeadKind.HYDRA, hidden_size=64, target_hidden_size=64, vocab_size=300, draft_vocab_size=300,
        feature_layers=(6,), num_heads=2, num_blocks=2, owns_lm_head=True, is_grounded=True, decoder=decoder,
        has_prefix_layer=has_prefix,
    )  # fmt: skip
    head = SimpleNamespace(spec=spec, weights=hydra_weights(target, spec, generator))
    both = HeadTwice(target, head)
    for depth in range(2):
        path = torch.randn(BATCH, 3, 64 * (depth + 2), generator=generator)
        close(both.emitted[f"logits.{depth}"]({"path": path})["logits"], hydra_logits(both.ops, spec, depth, path))
    if has_prefix:
        hidden = torch.randn(BATCH, 20, 64, generator=generator)
        inputs = chain(torch.full((BATCH, 20), 5)).inputs(torch.tensor([0, 0]))
        given = {"hidden": hidden, "node_offset": torch.zeros(1, dtype=torch.int32), **feed(inputs), **both.caches}
        evaluated = both.emitted["head"]({name: value for name, value in given.items() if name != "token_ids"})
        close(evaluated["next_hidden"], hydra_prefix(both.ops, spec, hidden, inputs))


def hydra_weights(target, spec: HeadSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights in the named form; a prefix layer is the target's first layer."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {}
    for i in range(spec.num_heads):
        for name, width in (("blocks.0", 64 * (i + 2)), ("residual", 64 * (i + 2)), ("blocks.1", 64)):
            weights |= {f"heads.{i}.{name}.weight": random(64, width), f"heads.{i}.{name}.bias": random(64)}
        weights[f"heads.{i}.lm_head.weight"] = random(300, 64)
    if spec.has_prefix_layer:
        own = {name: target.weights[name] for name in target.weights if name.startswith(("layers.0.", "norm."))}
        weights |= own
    return weights


@torch.inference_mode()
def test_a_draft_model_is_a_target_of_its_own_in_the_heads_plan(target):
    spec = HeadSpec(
        kind=HeadKind.MODEL, hidden_size=64, target_hidden_size=64, vocab_size=300, draft_vocab_size=300,
        feature_layers=(), decoder=target.spec, owns_embedding=True, owns_lm_head=True,
    )  # fmt: skip
    context = emission_context(target.spec, shared_tables={EMBEDDING: (300, 64)})
    (emitted,) = emit_head(new_builder(context.tensorrt), context, spec, dict(target.weights))
    names = [emitted.network.get_input(index).name for index in range(emitted.network.num_inputs)]
    assert emitted.name == "head"
    assert "logit_rows" in names
    assert EMBEDDING not in names, "its embedding is its own"
    assert EMBEDDING in emitted.graph.weight_names
