from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tactic:
    block_m: int
    block_n: int
    block_t: int
    num_warps: int
    num_stages: int
