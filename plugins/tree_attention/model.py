"""What each tactic should reach, from arithmetic alone: bytes, bytes in flight, rounds of CTAs, against the floor.

A prediction to be confirmed or refuted by benchmarks/gpu_check.py, not a measurement. B sequences, N nodes, M = N * G
rows of one (sequence, KV head), S splits, D head_dim; times in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from furcate.plugins.chips import Chip
from furcate.plugins.tree_attention.spec import AttentionSpec
from furcate.plugins.tree_attention.tactics import Tactic, choose_splits

LOADED_LATENCY_US = 1.0
"""Assumed: from issuing a copy to its arrival in shared memory while the memory is busy."""
COPY_SHARE = 0.9
"""Assumed: what a plain copy reaches of the sheet's bandwidth (kernel notes: 4.3 of 4.8 TB/s on an H200)."""
WARP_MATRIX_SHARE = 0.6
"""Assumed: what mma.sync reaches of the sheet's rate on chips whose rate is that of a wider instruction."""
SECOND_LAUNCH_US = 2.0
"""Assumed: the reduce kernel of a split call, in a CUDA graph."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One layer of one step. `prefix` is the cached tokens of every sequence; 16-bit activations and pages."""

    spec: AttentionSpec
    batch: int
    prefix: int
    nodes: int
    element_bytes: int = 2

    @property
    def rows(self) -> int:
        """M: rows that share one read of K/V."""
        return self.nodes * self.spec.group_size

    @property
    def minimum_bytes(self) -> int:
        """What any kernel moves: the prefix once, q, k, v and the stored rows, and the result."""
        spec = self.spec
        cached = self.batch * self.prefix * spec.num_kv_heads * spec.head_dim * 2
        stored = self.batch * self.nodes * spec.num_kv_heads * spec.head_dim * 2
        result = self.batch * self.nodes * spec.num_query_heads * spec.head_dim
        return (cached + self.batch * self.nodes * spec.qkv_width + stored + result) * self.element_bytes

    @property
    def useful_flops(self) -> float:
        """Two products of every query row with every key it may see, prefix and tree."""
        heads = self.batch * self.spec.num_query_heads
        return 4.0 * heads * self.nodes * (self.prefix + self.nodes) * self.spec.head_dim

    def floor_us(self, chip: Chip) -> float:
        """The larger of memory at the sheet's bandwidth and arithmetic at the sheet's rate."""
        memory = self.minimum_bytes / chip.terabytes_per_second / 1e6
        return max(memory, self.useful_flops / chip.bf16_teraflops / 1e6)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How a workload should run."""

    tactic: Tactic
    num_splits: int
    partial_bytes: int
    bytes_in_flight: int
    """Of one SM: copies issued and not yet waited for."""
    occupied_share: float
    """CTAs over the slots of the rounds they take."""
    memory_us: float
    tensor_us: float
    time_us: float
    floor_us: float

    @property
    def floor_share(self) -> float:
        """1.0 would be the floor itself."""
        return self.floor_us / self.time_us


def predict(workload: Workload, chip: Chip, tactic: Tactic, ctas_per_sm: int) -> Prediction:
    """The prediction for one tactic; `ctas_per_sm` is what the compiled kernel allows."""
    spec = workload.spec
    num_blocks = -(-workload.rows // tactic.block_m)
    num_ctas, slots = workload.batch * spec.num_kv_heads * num_blocks, chip.num_sms * ctas_per_sm
    splits = choose_splits(num_ctas, slots, workload.prefix, tactic)
    rounds = -(-num_ctas * splits // slots)
    occupied = num_ctas * splits / (rounds * slots)
    partial_rows = workload.batch * spec.num_kv_heads * workload.rows * splits
    partial_bytes = 0 if splits == 1 else 2 * partial_rows * (spec.head_dim + 2) * 4

    tile_bytes = 2 * tactic.block_n * spec.head_dim * workload.element_bytes
    in_flight = ctas_per_sm * (tactic.num_stages - 1) * tile_bytes
    by_latency = in_flight * chip.num_sms / LOADED_LATENCY_US / 1e6
    bandwidth = min(chip.terabytes_per_second * COPY_SHARE, by_latency * min(1.0, num_ctas * splits / slots))
    memory_us = (workload.minimum_bytes + partial_bytes) / bandwidth / 1e6

    keys = workload.prefix + -(-workload.nodes // tactic.block_t) * tactic.block_t
    executed = 4.0 * num_ctas * tactic.block_m * keys * spec.head_dim
    is_narrow = chip.has_wide_matrix_unit and tactic.block_m < 64
    rate = chip.bf16_teraflops * (WARP_MATRIX_SHARE if is_narrow else 1.0)
    tensor_us = executed / rate / 1e6 / occupied
    time_us = max(memory_us, tensor_us) + (SECOND_LAUNCH_US if splits > 1 else 0.0)
    return Prediction(
        tactic=tactic,
        num_splits=splits,
        partial_bytes=partial_bytes,
        bytes_in_flight=in_flight,
        occupied_share=occupied,
        memory_us=memory_us,
        tensor_us=tensor_us,
        time_us=time_us,
        floor_us=workload.floor_us(chip),
    )
