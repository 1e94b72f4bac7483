"""A target or head twice: run by the torch executor's operations, and emitted for TensorRT-RTX and evaluated by the interpreter.

Both keep their own K/V between passes, so that a prompt, a chain and a tree follow one another as they do in serving.
"""

from dataclasses import dataclass
from typing import Any

import torch
from network_interpreter import NetworkInterpreter
from torch import Tensor

from furcate.builder.network.decoder import run_target
from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.network.rope import rope_table
from furcate.builder.network.spec import DecoderSpec
from furcate.builder.ops.tensorrt_versions import TensorRT, installed_rtx
from furcate.builder.ops.torch import RopeTables, TorchOps
from furcate.builder.tensorrt_networks import EmissionContext, EmittedNetwork, NativeSettings, emit_target
from furcate.decoding.tree import pack_mask, tree_from_parents
from furcate.plugins.tree_attention.spec import RopeTable

NUM_SLOTS, PAGE_SIZE = 192, 16


def rtx() -> TensorRT:
    """The TensorRT-RTX of the development environment."""
    found = installed_rtx()
    assert found is not None, "pip install 'furcate[dev]'"
    return found


def new_builder(tensorrt: TensorRT) -> Any:
    """A builder that raises no dialogue below errors."""
    return tensorrt.module.Builder(tensorrt.module.Logger(tensorrt.module.Logger.ERROR))


def rope_tables(spec: DecoderSpec, num_positions: int = NUM_SLOTS) -> RopeTables:
    """The rotary tables of a target."""
    local = None if spec.local_rope is None else RopeTable(*rope_table(spec, num_positions, spec.local_rope))
    return RopeTables(everywhere=RopeTable(*rope_table(spec, num_positions)), local=local)


def emission_context(spec: DecoderSpec, dtype: torch.dtype = torch.float32, **changes: Any) -> EmissionContext:
    """Native attention over caches of NUM_SLOTS tokens."""
    settings = {
        "tensorrt": rtx(), "dtype": dtype, "attention": NativeSettings(num_slots=NUM_SLOTS), "rope": rope_tables(spec),
    }  # fmt: skip
    return EmissionContext(**{**settings, **changes})


def caches_of(interpreter: NetworkInterpreter, batch: int) -> dict[str, Tensor]:
    """The network's K/V caches, nothing in them yet."""
    caches = {}
    for index in range(interpreter.network.num_inputs):
        tensor = interpreter.network.get_input(index)
        if "_cache." in tensor.name:
            caches[tensor.name] = torch.zeros(batch, *tuple(tensor.shape)[1:])
    return caches


@dataclass(frozen=True)
class Nodes:
    """One pass of B rows: a chain (every node's parent is the one before it) or any tree, by parents [B,N]."""

    token_ids: Tensor
    parents: Tensor

    def inputs(self, cache_lengths: Tensor) -> PassInputs:
        counts = torch.full((len(self.parents),), self.parents.shape[1])
        tree = tree_from_parents(self.token_ids, self.parents, counts, max_depth=self.parents.shape[1])
        return PassInputs(
            token_ids=self.token_ids.int(),
            positions=(cache_lengths[:, None] + tree.depths).int(),
            tree_mask=pack_mask(tree.ancestor_mask),
            cache_lengths=cache_lengths.int(),
            page_table=torch.arange(len(self.parents) * NUM_SLOTS // PAGE_SIZE).int().view(len(self.parents), -1),
        )


def chain(token_ids: Tensor) -> Nodes:
    """A prompt chunk or a chain."""
    parents = (torch.arange(token_ids.shape[1]) - 1).clamp(min=0)
    return Nodes(token_ids, parents[None].expand(token_ids.shape))


def random_tree(batch: int, num_nodes: int, vocabulary: int, seed: int) -> Nodes:
    """Every node below some earlier one, each row another tree."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [0, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes))] for _ in range(batch)
    ]
    ids = torch.randint(2, vocabulary, (batch, num_nodes), generator=generator)
    return Nodes(ids, torch.tensor(rows))


class TargetTwice:
    """A target in both forms. `weights` are float32 named tensors; `few_bits` those that are emitted quantised instead."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, Tensor],
        taps: tuple[int, ...] = (),
        batch: int = 2,
        few_bits: dict[str, QuantisedWeight] | None = None,
    ) -> None:
        self.spec, self.taps = spec, taps
        num_pages = batch * NUM_SLOTS // PAGE_SIZE
        pool = torch.zeros(spec.num_layers, num_pages, 2, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        self.ops = TorchOps(weights, rope_tables(spec), pool, spec.has_unit_offset_norm)
        if spec.is_tied:
            self.ops.tie_lm_head()
        context = emission_context(spec)
        own = {**weights, **(few_bits or {})}
        self.emitted: EmittedNetwork = emit_target(new_builder(context.tensorrt), context, spec, own, taps)
        kept = self.emitted.graph.kept
        self.interpreter = NetworkInterpreter(context.tensorrt.module, self.emitted.network, kept)
        self.caches = caches_of(self.interpreter, batch)

    def run(
        self, nodes: Nodes, cache_lengths: Tensor, logit_rows: Tensor | None = None
    ) -> tuple[Any, dict[str, Tensor]]:
        """(the torch executor's outputs, the emitted network's)."""
        inputs = nodes.inputs(cache_lengths)
        batch, num_nodes = nodes.token_ids.shape
        rows = torch.arange(num_nodes).expand(batch, -1) if logit_rows is None else logit_rows
        expected = run_target(self.ops, self.spec, inputs, self.taps, rows)
        evaluated = self.interpreter({**feed(inputs), "logit_rows": rows.int(), **self.caches})
        self.caches = {name: evaluated.pop(f"{name}.out") for name in self.caches}
        return expected, evaluated


def feed(inputs: PassInputs) -> dict[str, Tensor]:
    """The inputs that every network with native attention reads."""
    assert inputs.tree_mask is not None
    return {
        "token_ids": inputs.token_ids, "positions": inputs.positions, "tree_mask": inputs.tree_mask,
        "cache_lengths": inputs.cache_lengths,
    }  # fmt: skip
