"""What every executor offers the step: the passes of an engine, its K/V pools, and what is known of its head.

B batch, N nodes, R rows asked for, H hidden, F feature width, V vocabulary, Vd draft vocabulary, K nodes of a level, W path width,
P pages, A accepted nodes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from furcate.builder.engine import Manifest
from furcate.builder.network.inputs import PassInputs, TargetOutputs
from furcate.builder.network.spec import HeadSpec
from furcate.decoding.clock import Clock


@dataclass(frozen=True, kw_only=True)
class CommitRows:
    """What a step accepted: path_nodes[b, :num_accepted[b]] lie behind cache_lengths[b] committed tokens."""

    page_table: Int32[Tensor, "B P"]
    cache_lengths: Int32[Tensor, " B"]
    path_nodes: Int64[Tensor, "B A"]
    num_accepted: Int64[Tensor, " B"]


class EngineExecutor(Protocol):
    """An engine that has been loaded. Passes write K/V into `target_pool` and `head_pool`.

    The pools have one page more than sequences may have, page `num_pages`: the scratch page, for rows that nobody reads.
    """

    manifest: Manifest
    tokenizer_dir: Path
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    num_pages: int
    """Pages that sequences may have."""
    target_pool: Tensor
    head_pool: Tensor | None
    head: HeadSpec | None

    @property
    def drafters(self) -> Sequence["EngineExecutor"]:
        """The engine as each of its heads sees it: the target beside that head, its pool and vocabulary. The first is this one."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a step on a GPU may be recorded as one graph."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """While it lasts, passes may be recorded, to be replayed later."""
        ...

    def target_pass(self, inputs: PassInputs, logit_rows: Int64[Tensor, "B R"] | None = None) -> TargetOutputs:
        """Logits and features of one target pass; all nodes' K/V is written behind the committed tokens."""
        ...

    def commit(self, rows: CommitRows) -> None:
        """Moves the accepted nodes' K/V of the target to each sequence's end."""
        ...

    def fuse_features(self, features: Float[Tensor, "B N F"]) -> Float[Tensor, "B N H"]:
        """The hidden states an EAGLE head's recurrence starts from."""
        ...

    def head_pass(self, hidden: Float[Tensor, "B N H"], inputs: PassInputs) -> Float[Tensor, "B N H"]:
        """The EAGLE head's next recurrent hidden states; K/V of all rows is written to the head's pool."""
        ...

    def head_logits(self, hidden: Float[Tensor, "B N H"]) -> Float[Tensor, "B N Vd"]:
        """The EAGLE head's draft logits, in its own vocabulary."""
        ...

    def medusa_logits(self, hidden: Float[Tensor, "B H"]) -> list[Float[Tensor, "B Vd"]]:
        """Draft logits of every Medusa head at one position."""
        ...

    def hydra_prefix(self, features: Float[Tensor, "B N H"], inputs: PassInputs) -> Float[Tensor, "B N H"]:
        """The hidden states that Hydra's heads read; K/V of a prefix layer is written to the head's pool."""
        ...

    def hydra_logits(self, depth: int, path: Float[Tensor, "B K W"]) -> Float[Tensor, "B K Vd"]:
        """Draft logits of the children of nodes at `depth`, from their paths (see `network.heads.hydra_logits`)."""
        ...

    def draft_model_pass(self, inputs: PassInputs, *, last_only: bool = False) -> Float[Tensor, "B N V"]:
        """A draft model's logits, of the last node only where that is enough; all nodes' K/V is written to its pool."""
        ...

    def embed(self, token_ids: Int64[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """The embeddings that the head reads."""
        ...

    def target_token_ids(self, draft_ids: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        """Target ids of draft-vocabulary ids."""
        ...

    def target_laws(self, laws: Float[Tensor, "B L Vd"]) -> Float[Tensor, "B L V"]:
        """Laws over the draft vocabulary as laws over the target's; what the draft does not know has probability 0."""
        ...
