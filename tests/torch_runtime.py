"""A stand-in for TensorRT's runtime on a CPU: engines whose enqueue reads the bound addresses and runs torch's operations.

Everything the executor does is real but the enqueue: profiles, shapes, addresses, the K/V pages reached through `kv_pool`.
It refuses what TensorRT refuses: unknown tensors, shapes outside the profile, an unbound tensor.
"""

import ctypes
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from furcate.builder.network.decoder import run_target
from furcate.builder.network.heads import (
    eagle_fuse,
    eagle_layer,
    eagle_logits,
    hydra_logits,
    hydra_prefix,
    medusa_logits,
)
from furcate.builder.network.inputs import PassInputs
from furcate.builder.network.spec import HeadKind
from furcate.builder.ops.tensorrt import SPLIT_LINEARS
from furcate.builder.ops.torch import TorchOps
from furcate.builder.tensor_parallel import rank_spec, rank_weights
from furcate.builder.tensorrt_config import Binding, TensorRTRecord
from furcate.builder.tensorrt_engine import engine_buckets, head_weights, rope_tables, shared_tables
from furcate.builder.tensorrt_profiles import all_profiles
from furcate.decoding.executors.torch import TORCH_DTYPES

TYPES = {"FLOAT": torch.float32, "INT32": torch.int32, "INT64": torch.int64}
VERSION, PLUGINS = "11.4.0.106", "0123456789abcdef"


def at_address(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor that lies at an address; nothing is copied."""
    num_bytes = prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype).view(shape)


def bindings_of(manifest) -> dict[str, tuple[Binding, ...]]:
    """The I/O table of an engine with paged attention in float32."""
    head, target = manifest.head, manifest.target
    tables = shared_tables(manifest)
    several = [
        ("token_ids", 2),
        ("positions", 2),
        ("tree_mask", 3),
        ("cache_lengths", 1),
        ("page_table", 2),
        ("num_nodes", 1),
    ]
    passes = [("INT32", name, (-1,) * rank) for name, rank in several]

    def entries(inputs, outputs):
        everything = [(entry, False) for entry in inputs] + [(("FLOAT", *entry), True) for entry in outputs]
        return tuple(Binding(dtype=e[0], name=e[1], shape=e[2], is_output=is_output) for e, is_output in everything)

    table_inputs = {name: ("FLOAT", name, shape) for name, shape in tables.items()}
    features = (
        []
        if head is None or not head.feature_layers
        else [("features", (-1, -1, head.target_hidden_size * len(head.feature_layers)))]
    )
    pool = ("INT64", "kv_pool", (target.num_layers,))
    target_inputs = [*passes, ("INT32", "logit_rows", (-1, -1)), pool, *table_inputs.values()]
    plans = {"target": entries(target_inputs, [("logits", (-1, -1, target.vocab_size)), *features])}
    if head is None:
        return plans
    hidden = ("FLOAT", "hidden", (-1, -1, head.hidden_size))
    if head.kind is HeadKind.MODEL:
        inputs = [*passes, ("INT32", "logit_rows", (-1, -1)), ("INT64", "kv_pool", (head.decoder.num_layers,))]
        return plans | {"head": entries(inputs, [("logits", (-1, -1, head.vocab_size))])}
    if head.kind is HeadKind.HYDRA:
        for depth in range(head.num_heads):
            path = ("FLOAT", "path", (-1, -1, head.hidden_size * (depth + 2)))
            plans[f"logits.{depth}"] = entries([path], [("logits", (-1, -1, head.vocab_size))])
        if head.has_prefix_layer:
            inputs = [hidden, *passes[1:], ("INT64", "kv_pool", (1,))]
            plans["head"] = entries(inputs, [("next_hidden", (-1, -1, head.hidden_size))])
        return plans
    if head.num_heads:
        outputs = [(f"logits.{i}", (-1, -1, head.draft_vocab_size)) for i in range(head.num_heads)]
        return plans | {"head": entries([hidden], outputs)}
    plans["head"] = entries(
        [hidden, *passes, ("INT64", "kv_pool", (1,)), *table_inputs.values()],
        [("next_hidden", (-1, -1, head.hidden_size))],
    )
    plans["logits"] = entries([hidden], [("logits", (-1, -1, head.draft_vocab_size))])
    if len(head.feature_layers) > 1:
        plans["fuse"] = entries([("FLOAT", *features[0])], [("hidden", (-1, -1, head.hidden_size))])
    return plans


def record_of(manifest) -> TensorRTRecord:
    """What a build for one H100 would have recorded."""
    return TensorRTRecord(
        gpu="h100", arch=90, version=VERSION, plugin_version=PLUGINS, tp_size=1, num_splits=8, is_version_compatible=False,
        is_refittable=False, is_stripped=False, bindings=bindings_of(manifest), shared_tables=tuple(shared_tables(manifest)),
    )  # fmt: skip


class Context:
    """IExecutionContext."""

    def __init__(self, engine):
        self.engine, self.index, self.shapes, self.addresses = engine, 0, {}, {}
        self.num_shapes_set = 0

    def set_device_memory(self, address, size):
        assert address and size >= self.engine.device_memory_size_v2

    def set_optimization_profile_async(self, index, stream):
        assert 0 <= index < self.engine.num_optimization_profiles
        self.index = index
        return True

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.get_tensor_profile_shape(name, self.index)
        assert all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)), f"{name} {shape} of {low} to {high}"
        self.shapes[name] = shape
        self.num_shapes_set += 1

    def set_tensor_address(self, name, address):
        assert name in self.engine.bindings and address % 4 == 0
        self.addresses[name] = address

    def get_tensor_shape(self, name):
        declared = self.engine.bindings[name].shape
        source = self.shapes["logit_rows" if name == "logits" and "logit_rows" in self.shapes else self.engine.leading]
        return (*source[:2], *declared[2:])

    def execute_async_v3(self, stream):
        bound = {}
        for name, binding in self.engine.bindings.items():
            shape = tuple(self.get_tensor_shape(name) if binding.is_output else self.shapes[name])
            bound[name] = at_address(self.addresses[name], TYPES[binding.dtype], shape)
        inputs = {name: t for name, t in bound.items() if not self.engine.bindings[name].is_output}
        for name, value in self.engine.compute(inputs).items():
            bound[name].copy_(value)
        self.engine.num_passes += 1
        return True


class RankOps(TorchOps):
    """Operations of one rank's weights: what is divided by columns is summed over the ranks, as the emitted collectives do."""

    def linear(self, name, x, residual=None):
        if not name.endswith(SPLIT_LINEARS):
            return super().linear(name, x, residual)
        out = super().linear(name, x)
        dist.all_reduce(out)
        return out if residual is None else out + residual


class PlanEngine:
    """ICudaEngine of one plan of `engine`, an engine directory of the torch executor; of one rank where there are `ranks`."""

    device_memory_size_v2 = 64

    def __init__(self, plan: str, engine, bindings, ranks=None):
        self.manifest, self.plan, self.num_passes, self.ops = engine.manifest, plan, 0, None
        self.ranks = ranks if plan == "target" else None
        self.bindings = {binding.name: binding for binding in bindings}
        self.leading = "positions" if "positions" in self.bindings else next(iter(self.bindings))
        self.profiles = all_profiles(engine_buckets(self.manifest, is_head=plan != "target"))
        target = engine.weights("target")
        tied = {"lm_head.weight": target["embed_tokens.weight"]} if self.manifest.target.is_tied else {}
        self.weights = {**target, **tied}
        if self.ranks is not None:
            self.weights = rank_weights(self.manifest.target, self.weights, self.ranks.rank, self.ranks.size)
        if plan != "target":
            self.weights |= head_weights(self.manifest, self.weights, engine.weights("head"))
            decoder = self.manifest.head.decoder
            if self.manifest.head.kind is HeadKind.MODEL and decoder.is_tied:
                self.weights["lm_head.weight"] = self.weights["embed_tokens.weight"]

    @property
    def num_io_tensors(self):
        return len(self.bindings)

    @property
    def num_optimization_profiles(self):
        return len(self.profiles)

    def get_tensor_name(self, index):
        return list(self.bindings)[index]

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=self.bindings[name].dtype)

    def get_tensor_shape(self, name):
        return self.bindings[name].shape

    def get_tensor_profile_shape(self, name, index):
        profile = self.profiles[index]
        shapes = (profile.smallest, profile.typical, profile.largest)
        return [shape.of(name, self.bindings[name].shape) for shape in shapes]

    def create_execution_context(self, strategy):
        assert strategy == "USER_MANAGED"
        return Context(self)

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The plan's outputs."""
        manifest, head = self.manifest, self.manifest.head
        spec = manifest.target if self.plan == "target" else head.decoder
        if self.ranks is not None:
            spec = rank_spec(spec, self.ranks.size)
        if self.ops is None:
            pool = None if spec is None or "kv_pool" not in inputs else self._pool(inputs["kv_pool"], spec)
            rope = None if pool is None else rope_tables(manifest, spec)
            make = TorchOps if self.ranks is None else RankOps
            self.ops = make({name: w for name, w in self.weights.items() if w.is_floating_point()}, rope, pool)
        ops = self.ops
        if self.plan == "target":
            given = self._pass(inputs)
            out = run_target(ops, spec, given, manifest.feature_layers, inputs["logit_rows"].long())
            return {"logits": out.logits} | ({} if out.features is None else {"features": out.features})
        if self.plan == "fuse":
            return {"hidden": eagle_fuse(ops, head, inputs["features"])}
        if head.kind is HeadKind.MODEL:
            return {"logits": run_target(ops, spec, self._pass(inputs), (), inputs["logit_rows"].long()).logits}
        if self.plan.startswith("logits."):
            return {"logits": hydra_logits(ops, head, int(self.plan.removeprefix("logits.")), inputs["path"])}
        if head.kind is HeadKind.HYDRA:
            return {"next_hidden": hydra_prefix(ops, head, inputs["hidden"], self._pass(inputs))}
        if self.plan == "logits":
            return {"logits": eagle_logits(ops, head, inputs["hidden"])}
        if head.num_heads:
            return {f"logits.{i}": value for i, value in enumerate(medusa_logits(ops, head, inputs["hidden"]))}
        given = self._pass(inputs)
        embedding = ops.embedding("embed_tokens", given.token_ids)
        return {"next_hidden": eagle_layer(ops, head, inputs["hidden"], embedding, given)}

    def _pass(self, inputs):
        names = ("token_ids", "positions", "tree_mask", "cache_lengths", "page_table", "num_nodes")
        return PassInputs(**{name: inputs.get(name) for name in names})

    def _pool(self, addresses: Tensor, spec) -> Tensor:
        pages = -(-self.manifest.max_pool_tokens // self.manifest.page_size) + 1
        layer = (pages, 2, self.manifest.page_size, spec.num_kv_heads, spec.head_dim)
        step = prod(layer) * 4
        assert addresses.diff().eq(step).all(), "layers lie one behind the other"
        return at_address(int(addresses[0]), TORCH_DTYPES[self.manifest.dtype], (len(addresses), *layer))


class TorchRuntime:
    """The module that is injected as TensorRT; `engine` is where its plans take their weights from."""

    __version__ = VERSION
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")

    class Logger:
        WARNING = 2

        def __init__(self, level):
            pass

    def __init__(self, engine, ranks=None):
        self.engine, self.plans, self.ranks = engine, {}, ranks

    def Runtime(self, logger):
        return SimpleNamespace(deserialize_cuda_engine=self._deserialize)

    def _deserialize(self, content: bytes):
        plan = content.decode()
        if plan not in self.engine.manifest.tensorrt.bindings:
            return None
        self.plans[plan] = PlanEngine(plan, self.engine, self.engine.manifest.tensorrt.bindings[plan], self.ranks)
        return self.plans[plan]


def as_tensorrt_engine(engine, copy):
    """The torch engine as one with plans, its files in the folder `copy`: each plan file holds the plan's name."""
    manifest = replace(engine.manifest, tensorrt=record_of(engine.manifest))
    for file in engine.path.iterdir():
        (copy / file.name).symlink_to(file)
    for plan in manifest.tensorrt.bindings:
        (copy / ("rank0.engine" if plan == "target" else f"rank0.{plan}.engine")).write_text(plan)
    return replace(engine, path=copy, manifest=manifest)
