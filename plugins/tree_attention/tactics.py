"""Which blocks a call is computed in: one table by rows, architecture, head_dim and type, with the reason for each.

Rows are M = nodes * query heads per KV head of one (sequence, KV head). ctas_per_sm is what registers, shared and tensor
memory allow on sm_90 (wide) or sm_120 (narrow) for the largest head_dim of the line; the ahead-of-time tests hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from furcate.builder.errors import ConfigError
from furcate.plugins.chips import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM, WARP_SIZE, chip_of

PLUGIN_SHARED_BYTES = 49_152
"""What a kernel may use when TensorRT launches it from an engine: no call there raises the 48 KB default."""
MAX_SPLITS = 64
BLOCKS_PER_SPLIT = 2
"""A split of fewer blocks of keys costs more in its partial result than it saves."""


@dataclass(frozen=True, kw_only=True)
class Tactic:
    """Rows, prefix keys and tree columns of a block; warps; tiles of the prefix in shared memory at once."""

    block_m: int
    block_n: int
    block_t: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    head_parts: int = 1
    """Parts of the head that q.k is summed from, one a warp. In float32 a warp has no registers for a whole wide head."""

    @property
    def max_registers(self) -> int:
        """Registers a thread may take so that ctas_per_sm fit; ptxas by itself would rather spill to fit one more."""
        threads = self.ctas_per_sm * self.num_warps * WARP_SIZE
        return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM // threads // 8 * 8)


@dataclass(frozen=True, kw_only=True)
class TacticLine:
    """A line of the table: it holds up to max_rows rows and max_head_dim, the first fitting line counts."""

    max_rows: int | None
    """None: any number."""
    max_head_dim: int
    is_wide: bool | None
    """Warp-group or tensor-memory matrix instructions (sm_90, sm_100, sm_103); None: either."""
    element_bytes: int
    tactic: Tactic
    reason: str


def _blocks(m: int, n: int, t: int, warps: int, stages: int, ctas: int) -> Tactic:
    return Tactic(block_m=m, block_n=n, block_t=t, num_warps=warps, num_stages=stages, ctas_per_sm=ctas)


def _line(
    rows: int | None, head_dim: int, is_wide: bool | None, tactic: Tactic, reason: str, size: int = 2
) -> TacticLine:
    return TacticLine(
        max_rows=rows, max_head_dim=head_dim, is_wide=is_wide, element_bytes=size, tactic=tactic, reason=reason
    )


_BY_PARTS = replace(_blocks(16, 16, 16, 8, 2, 1), head_parts=8)

TACTICS = (
    _line(16, 64, True, _blocks(16, 64, 16, 4, 3, 5), "memory bound: many small CTAs keep the most copies in flight"),
    _line(16, 128, True, _blocks(16, 64, 16, 4, 3, 3), "memory bound: 3 CTAs x 2 tiles of 32 KB in flight per SM"),
    _line(16, 256, True, _blocks(16, 32, 16, 4, 3, 2), "64 keys would spill at head_dim 256"),
    _line(32, 64, True, _blocks(32, 64, 32, 4, 3, 3), "the whole tree in two rows of mma.sync, K/V read once"),
    _line(32, 128, True, _blocks(32, 64, 32, 4, 3, 2), "64 rows of wgmma would be half empty"),
    _line(64, 64, True, _blocks(64, 64, 32, 4, 3, 3), "one warp group; K/V read once"),
    _line(64, 128, True, _blocks(64, 64, 32, 4, 3, 2), "one warp group, 2 CTAs: one computes while the other waits"),
    _line(None, 128, True, _blocks(128, 64, 32, 8, 4, 1), "tensor bound: two warp groups share every K/V tile"),
    _line(
        None, 256, True, _blocks(64, 32, 16, 8, 3, 1), "128 rows of 256 would spill; two warp groups split the columns"
    ),
    _line(16, 64, False, _blocks(16, 32, 16, 4, 3, 4), "100 KB of shared memory: small tiles, more CTAs"),
    _line(16, 128, False, _blocks(16, 32, 16, 4, 3, 2), "100 KB of shared memory: two CTAs with two tiles in flight"),
    _line(16, 256, False, _blocks(16, 32, 16, 4, 2, 2), "a third tile would cost the second CTA"),
    _line(
        None, 64, False, _blocks(64, 64, 16, 8, 3, 1), "mma.sync keeps q in registers: two times four warps share them"
    ),
    _line(None, 128, False, _blocks(32, 32, 32, 4, 3, 2), "64 rows of 128 would spill; K/V re-reads hit the L2 cache"),
    _line(None, 256, False, _blocks(32, 16, 16, 8, 3, 1), "64 rows of 256 would spill"),
    _line(None, 64, None, _blocks(16, 32, 16, 4, 2, 2), "float32 by three tf32 products: for checking, not serving", 4),
    _line(
        None, 256, None, _BY_PARTS, "float32: q of a wide head and its tf32 remainder would fill a warp's registers", 4
    ),
)

PLUGIN_TACTICS = (
    _line(16, 64, None, _blocks(16, 32, 16, 4, 3, 4), "as narrow chips: small tiles"),
    _line(16, 128, None, _blocks(16, 32, 16, 4, 3, 2), "two tiles in flight within 48 KB"),
    _line(32, 64, True, _blocks(32, 64, 32, 4, 3, 3), "as without the limit: 40 KB"),
    _line(32, 128, True, _blocks(32, 32, 32, 4, 3, 2), "32 keys: two tiles in flight within 48 KB"),
    _line(None, 64, True, _blocks(64, 64, 32, 4, 2, 3), "one warp group; a third tile would exceed 48 KB"),
    _line(None, 128, True, _blocks(64, 16, 16, 4, 3, 2), "two tiles of 8 KB in flight; 32 keys exceed 48 KB on sm_100"),
    _line(None, 64, False, _blocks(64, 64, 16, 8, 3, 1), "as without the limit: 40 KB"),
    _line(None, 128, False, _blocks(32, 32, 32, 4, 3, 2), "as without the limit: 42 KB"),
    _line(
        None, 256, None, _blocks(16, 32, 16, 4, 2, 2), "more rows of 256 exceed 48 KB; K/V re-reads hit the L2 cache"
    ),
)
"""The tactics of at most 48 KB that a TensorRT engine carries; TensorRT measures those that fit and keeps the best."""


def fitting_lines(table: tuple[TacticLine, ...], arch: int, head_dim: int, element_bytes: int) -> list[TacticLine]:
    """The table's lines for that chip, head_dim and type, by growing rows; one per number of rows."""
    is_wide = chip_of(arch).has_wide_matrix_unit
    lines: dict[int | None, TacticLine] = {}
    for line in table:
        is_fit = line.element_bytes == element_bytes and head_dim <= line.max_head_dim
        if is_fit and line.is_wide in (None, is_wide):
            lines.setdefault(line.max_rows, line)
    return list(lines.values())


def choose_tactic(
    arch: int, rows: int, head_dim: int, element_bytes: int, table: tuple[TacticLine, ...] = TACTICS
) -> Tactic:
    """The tactic of the first line that holds the call; ConfigError where none does."""
    for line in fitting_lines(table, arch, head_dim, element_bytes):
        if line.max_rows is None or rows <= line.max_rows:
            return line.tactic
    raise ConfigError(
        f"No kernel for head_dim {head_dim} with {element_bytes}-byte activations; head_dim is at most 256 and "
        "activations are float16, bfloat16 or float32."
    )


def choose_splits(num_ctas: int, num_slots: int, num_keys: int, tactic: Tactic) -> int:
    """Splits of a prefix of `num_keys` for the shortest run, when one split takes `num_ctas` CTAs and the chip holds
    `num_slots` of them at once.

    With 64 CTAs on 264 slots four splits fill one round; with 192 four splits make three full rounds of quarters, which
    beats one round that leaves 72 slots idle. A split writes and reads float32 rows where a key is read in 16 bits.
    """
    most = max(1, min(MAX_SPLITS, num_keys // (BLOCKS_PER_SPLIT * tactic.block_n)))
    partial = 2 * tactic.block_m / max(num_keys, 1)

    def time(splits: int) -> float:
        rounds = -(-num_ctas * splits // num_slots) / splits
        return rounds if splits == 1 else rounds + partial * num_ctas * splits / num_slots

    return min(range(1, most + 1), key=time)
