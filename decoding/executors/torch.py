"""Runs an engine with torch: the networks, their weights and their K/V pools.

B batch, N nodes, R rows asked for, H hidden, F feature width, V vocabulary, Vd draft vocabulary, S drafter state width.
"""

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.engine import Engine, head_prefix
from furcate.builder.errors import EngineMismatch
from furcate.builder.network.decoder import run_target
from furcate.builder.network.heads import (
    eagle_fuse,
    eagle_layer,
    eagle_logits,
    hydra_logits,
    hydra_prefix,
    medusa_logits,
)
from furcate.builder.network.inputs import PassInputs, TargetOutputs
from furcate.builder.network.rope import rope_table
from furcate.builder.network.spec import DecoderSpec, HeadKind, HeadSpec
from furcate.builder.ops.torch import RopeTables, TorchOps
from furcate.builder.tree_config import MAX_TREE_NODES
from furcate.decoding.clock import Clock
from furcate.decoding.executors.executor import CommitRows
from furcate.decoding.executors.pool_memory import new_pool
from furcate.plugins.cache_commit.op import cache_commit
from furcate.plugins.tree_attention.spec import RopeTable

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor:
    """One engine loaded for torch. Passes write K/V into `target_pool` and `head_pool`, [layers, pages, 2, page_size, Hkv, D].

    The last page is nobody's; see executor.py.
    """

    is_capturable = True

    def __init__(self, engine: Engine, device: str | torch.device = "cpu") -> None:
        self.manifest = engine.manifest
        self.tokenizer_dir = engine.tokenizer_dir
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPES[self.manifest.dtype]
        self.clock = Clock()
        self.num_pages = -(-self.manifest.max_pool_tokens // self.manifest.page_size)
        target = self.manifest.target
        rope = self._rope_tables(target)
        self.target_pool = self._pool(target.num_layers, target)
        self.target_ops = self._ops(engine.weights("target"), rope, self.target_pool, target)
        if target.is_tied:
            self.target_ops.tie_lm_head()
        self.head = self.manifest.head
        self.head_pool: Tensor | None = None
        self.head_ops: TorchOps | None = None
        self.draft_token_ids: Int64[Tensor, " Vd"] | None = None
        if self.head is not None:
            self._load_head(engine.weights("head"), self.head)
        more = enumerate(self.manifest.more_heads, start=1)
        self.drafters = (self, *(self._beside(engine.weights(head_prefix(place)), head) for place, head in more))

    def _beside(self, weights: dict[str, Tensor], head: HeadSpec) -> "TorchExecutor":
        """The same target beside another head."""
        other = copy.copy(self)
        other.head, other.head_pool, other.draft_token_ids = head, None, None
        other._load_head(weights, head)
        other.drafters = (other,)
        return other

    def _load_head(self, weights: dict[str, Tensor], head: HeadSpec) -> None:
        draft_token_ids = weights.pop("draft_token_ids", None)
        if draft_token_ids is not None:
            self.draft_token_ids = draft_token_ids.to(self.device)
        rope = None
        if head.decoder is not None:
            self.head_pool = self._pool(head.decoder.num_layers, head.decoder)
            rope = self._rope_tables(head.decoder)
        self.head_ops = self._ops(weights, rope, self.head_pool, head.decoder)
        if head.kind is HeadKind.MODEL and head.decoder is not None and head.decoder.is_tied:
            self.head_ops.tie_lm_head()
        if not head.owns_embedding:
            self.head_ops.share_embedding(self.target_ops)
        if not head.owns_lm_head:
            self.head_ops.borrow_lm_head(self.target_ops, self.draft_token_ids)

    def _pool(self, num_layers: int, spec: DecoderSpec) -> Tensor:
        shape = (num_layers, self.num_pages + 1, 2, self.manifest.page_size, spec.num_kv_heads, spec.head_dim)
        return new_pool(shape, self.dtype, self.device)

    def _rope_tables(self, spec: DecoderSpec) -> RopeTables:
        # Draft nodes of a full context still need rows of the table.
        num_positions = self.manifest.max_context_tokens + 2 * MAX_TREE_NODES
        everywhere = RopeTable(*(part.to(self.device) for part in rope_table(spec, num_positions)))
        if spec.local_rope is None:
            return RopeTables(everywhere=everywhere)
        local = RopeTable(*(part.to(self.device) for part in rope_table(spec, num_positions, spec.local_rope)))
        return RopeTables(everywhere=everywhere, local=local)

    def _ops(
        self, weights: dict[str, Tensor], rope: RopeTables | None, pool: Tensor | None, spec: DecoderSpec | None
    ) -> TorchOps:
        for name, tensor in weights.items():
            if tensor.dtype != self.dtype:
                raise EngineMismatch(
                    f"engine weight {name} is {tensor.dtype}, the manifest says {self.dtype}; build the engine again."
                )
        on_device = {name: tensor.to(self.device) for name, tensor in weights.items()}
        return TorchOps(on_device, rope, pool, spec.has_unit_offset_norm if spec is not None else False)

    def capturing(self) -> AbstractContextManager[None]:
        """While it lasts, passes may be recorded: any may, at any time."""
        return nullcontext()

    def target_pass(self, inputs: PassInputs, logit_rows: Int64[Tensor, "B R"] | None = None) -> TargetOutputs:
        """Logits and features of one target pass; all nodes' K/V is written behind the committed tokens."""
        with self.clock.part("target_forward"):
            return run_target(self.target_ops, self.manifest.target, inputs, self.manifest.feature_layers, logit_rows)

    def commit(self, rows: CommitRows) -> None:
        """Moves the accepted nodes' K/V of the target to each sequence's end."""
        cache_commit(self.target_pool, rows.page_table, rows.cache_lengths, rows.path_nodes, rows.num_accepted)

    def fuse_features(self, features: Float[Tensor, "B N F"]) -> Float[Tensor, "B N H"]:
        """The hidden states an EAGLE head's recurrence starts from."""
        ops, head = self._head()
        with self.clock.part("head_forward"):
            return eagle_fuse(ops, head, features)

    def head_pass(self, hidden: Float[Tensor, "B N H"], inputs: PassInputs) -> Float[Tensor, "B N H"]:
        """The EAGLE head's next recurrent hidden states; K/V of all rows is written to the head's pool."""
        ops, head = self._head()
        with self.clock.part("head_forward"):
            return eagle_layer(ops, head, hidden, ops.embedding("embed_tokens", inputs.token_ids), inputs)

    def head_logits(self, hidden: Float[Tensor, "B N H"]) -> Float[Tensor, "B N Vd"]:
        """The EAGLE head's draft logits, in its own vocabulary."""
        ops, head = self._head()
        with self.clock.part("head_forward"):
            return eagle_logits(ops, head, hidden)

    def medusa_logits(self, hidden: Float[Tensor, "B H"]) -> list[Float[Tensor, "B Vd"]]:
        """Draft logits of every Medusa head at one position."""
        ops, head = self._head()
        with self.clock.part("head_forward"):
            return medusa_logits(ops, head, hidden)

    def hydra_prefix(self, features: Float[Tensor, "B N H"], inputs: PassInputs) -> Float[Tensor, "B N H"]:
        """The hidden states that Hydra's heads read; K/V of a prefix layer is written to the head's pool."""
        ops, head = self._head()
        if not head.has_prefix_layer:
            return features
        with self.clock.part("head_forward"):
            return hydra_prefix(ops, head, features, inputs)

    def hydra_logits(self, depth: int, path: Float[Tensor, "B K W"]) -> Float[Tensor, "B K Vd"]:
        """Draft logits of the children of nodes at `depth`, from their paths (see `network.heads.hydra_logits`)."""
        ops, head = self._head()
        with self.clock.part("head_forward"):
            return hydra_logits(ops, head, depth, path)

    def draft_model_pass(self, inputs: PassInputs, *, last_only: bool = False) -> Float[Tensor, "B N V"]:
        """A draft model's logits, of the last node only where that is enough; all nodes' K/V is written to its pool."""
        ops, head = self._head()
        assert head.decoder is not None
        rows = torch.full_like(inputs.token_ids[:, :1], inputs.token_ids.shape[1] - 1) if last_only else None
        with self.clock.part("head_forward"):
            return run_target(ops, head.decoder, inputs, (), rows).logits

    def embed(self, token_ids: Int64[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """The embeddings that the head reads."""
        return self._head()[0].embedding("embed_tokens", token_ids)

    def target_token_ids(self, draft_ids: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
        """Target ids of draft-vocabulary ids."""
        return draft_ids if self.draft_token_ids is None else self.draft_token_ids[draft_ids]

    def target_laws(self, laws: Float[Tensor, "B L Vd"]) -> Float[Tensor, "B L V"]:
        """Laws over the draft vocabulary as laws over the target's; what the draft does not know has probability 0."""
        if self.draft_token_ids is None:
            return laws
        shape = (*laws.shape[:2], self.manifest.target.vocab_size)
        return laws.new_zeros(shape).index_copy_(2, self.draft_token_ids, laws)

    def _head(self) -> tuple[TorchOps, HeadSpec]:
        assert self.head_ops is not None and self.head is not None, "this engine has no head"
        return self.head_ops, self.head
