"""Heads emitted for TensorRT against the torch executor's: every kind, prompt rows, then a tree drafted level by level.

Tolerance: 1e-3 on logits of size about 10; both sides compute in float32 and sum in another order.
"""

import pytest
import torch
from emitted_networks import NUM_SLOTS, caches_of, chain, emission_context, feed, new_builder, random_tree, rope_tables
from network_interpreter import NetworkInterpreter

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.checkpoints.target import read_target
from furcate.builder.errors import BuildError
from furcate.builder.network.heads import eagle_fuse, eagle_layer, eagle_logits, medusa_logits
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
        self.caches = caches_of(self.emitted["head"], BATCH)

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


def test_hydra_is_refused_for_tensorrt(target):
    spec = HeadSpec(
        kind=HeadKind.HYDRA, hidden_size=64, target_hidden_size=64, vocab_size=300, draft_vocab_size=300,
        feature_layers=(6,), num_heads=1, num_blocks=1,
    )  # fmt: skip
    with pytest.raises(BuildError, match="hydra heads are not emitted for TensorRT; use --executor torch"):
        emit_head(None, emission_context(target.spec), spec, {})
