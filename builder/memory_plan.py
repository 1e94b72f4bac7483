"""What an engine takes of a GPU's memory: weights, K/V pool, activations, and the sequences that would still fit.

Axes: B batch, N nodes, V vocabulary, H hidden, S splits, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from furcate.builder.engine import Manifest
from furcate.builder.gpus import Gpu
from furcate.builder.network.spec import DecoderSpec

USABLE_FRACTION = 0.94
"""Of the memory: the CUDA context, the driver and fragmentation take the rest. An assumption, not a measurement."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one GPU."""

    usable_bytes: int
    weight_bytes: int
    pool_bytes: int
    activation_bytes: int
    bytes_per_sequence: int
    """K/V cache of one sequence of max_context_tokens."""

    @property
    def left_bytes(self) -> int:
        """What is left; negative when the engine does not fit."""
        return self.usable_bytes - self.weight_bytes - self.pool_bytes - self.activation_bytes

    @property
    def sequences_that_fit(self) -> int:
        """Sequences of full length whose K/V fits beside weights and activations, whatever the pool is set to."""
        return max(0, (self.left_bytes + self.pool_bytes) // self.bytes_per_sequence)


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of the weights that ranks divide (the layers' matrices), and of those whole on every rank."""

    divided: int
    whole: int

    @classmethod
    def of(cls, weights: dict[str, tuple[tuple[int, ...], int]]) -> WeightBytes:
        """Of named weights: their shapes and bytes."""
        divided = sum(
            size for name, (shape, size) in weights.items() if name.startswith("target.layers.") and len(shape) == 2
        )
        return cls(divided=divided, whole=sum(size for _, size in weights.values()) - divided)


def memory_plan(manifest: Manifest, gpu: Gpu, weights: WeightBytes, num_splits: int, tp_size: int) -> MemoryPlan:
    """The plan of an engine with these weights; with tensor parallelism, of one rank."""
    size = ELEMENT_BYTES[manifest.dtype.value]
    target = manifest.target
    per_token = manifest.kv_bytes_per_token(tp_size)
    return MemoryPlan(
        usable_bytes=int(gpu.memory_bytes * USABLE_FRACTION),
        weight_bytes=weights.whole + weights.divided // tp_size,
        # One page more than sequences may have: see decoding/executors/executor.py.
        pool_bytes=per_token * (manifest.max_pool_tokens + manifest.page_size),
        activation_bytes=max(
            activation_bytes(target, manifest.max_batch_size * manifest.tree.budget, size, num_splits, tp_size),
            activation_bytes(target, manifest.prefill_chunk_tokens, size, num_splits, tp_size),
        ),
        bytes_per_sequence=per_token * manifest.max_context_tokens,
    )


def activation_bytes(spec: DecoderSpec, num_rows: int, element_bytes: int, num_splits: int, tp_size: int = 1) -> int:
    """An upper estimate of what one pass of `num_rows` rows keeps at once.

    Residual stream and its normed copy, the widest pair of a layer's intermediates, the splits' partial results in float32,
    and float32 logits of every row.
    """
    qkv = (spec.num_query_heads + 2 * spec.num_kv_heads) * spec.head_dim // tp_size
    intermediate = 3 * spec.intermediate_size // tp_size
    partial = 4 * num_splits * spec.num_query_heads * (spec.head_dim + 2) // tp_size
    layer = element_bytes * max(qkv + spec.hidden_size, intermediate) + partial
    return num_rows * (2 * element_bytes * spec.hidden_size + layer + 4 * spec.vocab_size)
