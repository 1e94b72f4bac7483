"""Runs an engine with TensorRT: the same passes as the torch executor, each an enqueue of a plan.

K/V pages are torch tensors that the plans reach by address (`kv_pool`), so that commit, page allocation and the step are the
torch executor's on CUDA. B batch, N nodes, R rows asked for, H hidden, F feature width, V vocabulary, Vd draft vocabulary,
W mask words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from furcate.builder.engine import Engine, Manifest
from furcate.builder.errors import EngineMismatch
from furcate.builder.few_bits import plain_weights
from furcate.builder.network.inputs import PassInputs, TargetOutputs
from furcate.builder.network.spec import DecoderSpec
from furcate.builder.plugin_version import plugin_version
from furcate.builder.tensor_parallel import rank_weights
from furcate.builder.tensorrt_config import TensorRTRecord
from furcate.builder.tensorrt_engine import head_weights
from furcate.builder.tensorrt_networks import EMBEDDING
from furcate.decoding.clock import Clock
from furcate.decoding.executors.drafted_rows import DraftedRows, chain_words, fitting_words
from furcate.decoding.executors.executor import CommitRows
from furcate.decoding.executors.pool_memory import new_pool
from furcate.decoding.executors.ranks import Operation, Ranks, join_ranks
from furcate.decoding.executors.tensorrt_plan import TensorRTPlan, load_plan, refit_plan
from furcate.plugins.cache_commit.op import cache_commit

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def check_machine(record: TensorRTRecord, version: str, arch: int, plugins: str) -> None:
    """Raises EngineMismatch where plans built for `record` cannot run: another GPU, another TensorRT, other plugins."""
    if arch != record.arch:
        raise EngineMismatch(
            f"the engine was built for {record.gpu} (sm_{record.arch}), this machine's GPU is of sm_{arch}; build it for that "
            "with --gpu."
        )
    is_same_major = version.split(".")[0] == record.version.split(".")[0]
    if version != record.version and not (record.is_version_compatible and is_same_major):
        raise EngineMismatch(
            f"the engine was built with TensorRT {record.version}, this is {version}; build it again, or with "
            "--version-compatible for every release of one major version."
        )
    if plugins != record.plugin_version:
        raise EngineMismatch(
            f"the engine's plugins are of version {record.plugin_version}, this furcate's are {plugins}; build it again."
        )


class TensorRTExecutor:
    """One engine loaded for TensorRT on the current GPU.

    With tensor parallelism it is one rank's: rank 0's is used as any other, and the other ranks' follow it.
    """

    def __init__(
        self, engine: Engine, trt: Any, device: str | torch.device = "cuda", ranks: Ranks | None = None
    ) -> None:
        record = engine.manifest.tensorrt
        if record is None:
            raise EngineMismatch(
                f"{engine.path} is an engine for the torch executor; build one with --executor tensorrt."
            )
        self.manifest: Manifest = engine.manifest
        self.tokenizer_dir = engine.tokenizer_dir
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPES[self.manifest.dtype]
        self.clock = Clock()
        self.num_pages = -(-self.manifest.max_pool_tokens // self.manifest.page_size)
        self.head = self.manifest.head
        self.drafters = (self,)
        target = self.manifest.target
        self.target_pool = self._pool(target.num_layers, target, record.tp_size)
        decoder = None if self.head is None else self.head.decoder
        self.head_pool = None if decoder is None else self._pool(decoder.num_layers, decoder, 1)
        stored = engine.weights("target")
        self._tables = {name: stored[name].to(self.device) for name in record.shared_tables}
        self.draft_token_ids = engine.weights("head").get("draft_token_ids")
        if self.draft_token_ids is not None:
            self.draft_token_ids = self.draft_token_ids.to(self.device)
        self._drafted = DraftedRows()
        self._is_capturing = False
        self._ranks = ranks
        # A recorded pass could not tell the other ranks of itself.
        self.is_capturable = ranks is None
        self._plans = self._load(engine, trt, record)

    def _load(self, engine: Engine, trt: Any, record: TensorRTRecord) -> dict[str, TensorRTPlan]:
        runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        plans, rank = {}, 0 if self._ranks is None else self._ranks.rank
        for name, bindings in record.bindings.items():
            if rank > 0 and name != "target":
                continue  # the head is rank 0's alone
            file = f"rank{rank}.engine" if name == "target" else f"rank0.{name}.engine"
            pool = self.target_pool if name == "target" else self.head_pool
            fixed = {**self._tables, **({} if pool is None else {"kv_pool": layer_addresses(pool)})}
            plan = load_plan(trt, runtime, engine.path / file)
            if record.is_stripped:
                refit_plan(trt, plan, _plan_weights(engine, name, rank, record.tp_size))
            communicator = self._ranks.communicator if self._ranks is not None and name == "target" else None
            plans[name] = TensorRTPlan(trt, plan, bindings, fixed, communicator)
        scratch_bytes = max(plan.scratch_bytes for plan in plans.values())
        self._scratch = torch.empty(max(scratch_bytes, 1), dtype=torch.uint8, device=self.device)
        for plan in plans.values():
            plan.make_contexts(self._scratch, self._stream())
        return plans

    def _pool(self, num_layers: int, spec: DecoderSpec, tp_size: int) -> Tensor:
        size = (self.manifest.page_size, spec.num_kv_heads // tp_size, spec.head_dim)
        shape = (num_layers, self.num_pages + 1, 2, *size)
        return new_pool(shape, self.dtype, self.device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def _run(self, plan: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = self._plans[plan]
        return (own.run_lasting if self._is_capturing else own.run)(inputs, self._stream(), self.device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """While it lasts, passes may be recorded: each shape then has a context of its own, which never sees another."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def target_pass(self, inputs: PassInputs, logit_rows: Int64[Tensor, "B R"] | None = None) -> TargetOutputs:
        """Logits and features of one target pass; all nodes' K/V is written behind the committed tokens."""
        batch, num_nodes = inputs.token_ids.shape
        if logit_rows is None:
            logit_rows = torch.arange(num_nodes, device=self.device).expand(batch, -1)
        with self.clock.part("target_forward"):
            given = {**pass_tensors(inputs), "logit_rows": logit_rows.int().contiguous()}
            if self._ranks is not None:
                self._ranks.send(Operation.TARGET_PASS, given)
            outputs = self._run("target", given)
        return TargetOutputs(logits=outputs["logits"], features=outputs.get("features"))

    def commit(self, rows: CommitRows) -> None:
        """Moves the accepted nodes' K/V of the target to each sequence's end, on every rank."""
        tensors = vars(rows)
        if self._ranks is not None:
            self._ranks.send(Operation.COMMIT, tensors)
        self._commit(tensors)

    def _commit(self, tensors: Mapping[str, Tensor]) -> None:
        names = ("page_table", "cache_lengths", "path_nodes", "num_accepted")
        cache_commit(self.target_pool, *(tensors[name] for name in names))

    def fuse_features(self, features: Float[Tensor, "B N F"]) -> Float[Tensor, "B N H"]:
        """The hidden states an EAGLE head's recurrence starts from."""
        if "fuse" not in self._plans:
            return features
        with self.clock.part("head_forward"):
            return self._run("fuse", {"features": features.contiguous()})["hidden"]

    def head_pass(self, hidden: Float[Tensor, "B N H"], inputs: PassInputs) -> Float[Tensor, "B N H"]:
        """The EAGLE head's next recurrent hidden states; K/V of all rows is written to the head's pool.

        The plugin knows no node offset, so a level is run together with the nodes drafted before it.
        """
        num_new = hidden.shape[1]
        rows, inputs = self._drafted.with_earlier(hidden, inputs)
        assert rows is not None
        with self.clock.part("head_forward"):
            given = {"hidden": rows.to(self.dtype).contiguous(), **pass_tensors(inputs)}
            return self._run("head", given)["next_hidden"][:, -num_new:]

    def head_logits(self, hidden: Float[Tensor, "B N H"]) -> Float[Tensor, "B N Vd"]:
        """The EAGLE head's draft logits, in its own vocabulary."""
        with self.clock.part("head_forward"):
            return self._run("logits", {"hidden": hidden.to(self.dtype).contiguous()})["logits"]

    def medusa_logits(self, hidden: Float[Tensor, "B H"]) -> list[Float[Tensor, "B Vd"]]:
        """Draft logits of every Medusa head at one position."""
        assert self.head is not None
        with self.clock.part("head_forward"):
            outputs = self._run("head", {"hidden": hidden[:, None].to(self.dtype).contiguous()})
        return [outputs[f"logits.{i}"][:, 0] for i in range(self.head.num_heads)]

    def hydra_prefix(self, features: Float[Tensor, "B N H"], inputs: PassInputs) -> Float[Tensor, "B N H"]:
        """The hidden states that Hydra's heads read; K/V of a prefix layer is written to the head's pool."""
        return self.head_pass(features, inputs) if "head" in self._plans else features

    def hydra_logits(self, depth: int, path: Float[Tensor, "B K W"]) -> Float[Tensor, "B K Vd"]:
        """Draft logits of the children of nodes at `depth`, from their paths (see `network.heads.hydra_logits`)."""
        with self.clock.part("head_forward"):
            return self._run(f"logits.{depth}", {"path": path.to(self.dtype).contiguous()})["logits"]

    def draft_model_pass(self, inputs: PassInputs, *, last_only: bool = False) -> Float[Tensor, "B N V"]:
        """A draft model's logits, of the last node only where that is enough; all nodes' K/V is written to its pool."""
        num_new = inputs.token_ids.shape[1]
        _, inputs = self._drafted.with_earlier(None, inputs)
        batch, num_nodes = inputs.token_ids.shape
        first = num_nodes - (1 if last_only else num_new)
        rows = torch.arange(first, num_nodes, dtype=torch.int32, device=self.device).expand(batch, -1)
        with self.clock.part("head_forward"):
            return self._run("head", {**pass_tensors(inputs), "logit_rows": rows.contiguous()})["logits"]

    def embed(self, token_ids: Int64[Tensor, ...]) -> Float[Tensor, "... H"]:
        """The embeddings that the head reads."""
        return torch.nn.functional.embedding(token_ids, self._tables[EMBEDDING])

    def target_token_ids(self, draft_ids: Int64[Tensor, ...]) -> Int64[Tensor, ...]:
        """Target ids of draft-vocabulary ids."""
        return draft_ids if self.draft_token_ids is None else self.draft_token_ids[draft_ids]

    def target_laws(self, laws: Float[Tensor, "B L Vd"]) -> Float[Tensor, "B L V"]:
        """Laws over the draft vocabulary as laws over the target's; what the draft does not know has probability 0."""
        if self.draft_token_ids is None:
            return laws
        shape = (*laws.shape[:2], self.manifest.target.vocab_size)
        return laws.new_zeros(shape).index_copy_(2, self.draft_token_ids, laws)

    def follow(self) -> None:
        """Repeats rank 0's passes and commits until it has ended."""
        assert self._ranks is not None and self._ranks.rank > 0
        while True:
            operation, tensors = self._ranks.receive()
            if operation is Operation.STOP:
                return
            if operation is Operation.TARGET_PASS:
                self._run("target", tensors)
            else:
                self._commit(tensors)


def _plan_weights(engine: Engine, plan: str, rank: int, tp_size: int) -> dict[str, Tensor]:
    """The weights of a plan under the names it was emitted with."""
    target = engine.weights("target")
    if plan == "target":
        return plain_weights(rank_weights(engine.manifest.target, target, rank, tp_size))
    return head_weights(engine.manifest, target, engine.weights("head"))


def load_tensorrt_executor(engine: Engine, device: str | torch.device = "cuda") -> TensorRTExecutor:
    """The executor of a TensorRT engine on this machine; of several GPUs, this process's rank.

    Raises EngineMismatch naming what does not fit.
    """
    from furcate.builder.ops.tensorrt_versions import installed_tensorrt

    record = engine.manifest.tensorrt
    if record is None:
        raise EngineMismatch(f"{engine.path} is an engine for the torch executor; build one with --executor tensorrt.")
    tensorrt = installed_tensorrt()
    if tensorrt is None or not torch.cuda.is_available():
        missing = "TensorRT cannot be imported" if tensorrt is None else "there is no usable GPU"
        raise EngineMismatch(
            f"{engine.path} needs TensorRT {record.version} on a GPU of sm_{record.arch}, and {missing} here; serve it in "
            "NVIDIA's container, or build one with --executor torch."
        )
    ranks = join_ranks(record.tp_size) if record.tp_size > 1 else None
    device = device if ranks is None else ranks.device
    major, minor = torch.cuda.get_device_capability(device)
    check_machine(record, tensorrt.version, 10 * major + minor, plugin_version())
    return TensorRTExecutor(engine, tensorrt.module, device, ranks)


def layer_addresses(pool: Tensor) -> Int64[Tensor, " L"]:
    """Device address of every layer's pages, as the plans' `kv_pool`."""
    step = pool.stride(0) * pool.element_size()
    addresses = [pool.data_ptr() + layer * step for layer in range(pool.shape[0])]
    return torch.tensor(addresses, dtype=torch.int64, device=pool.device)


def pass_tensors(inputs: PassInputs) -> dict[str, Tensor]:
    """The inputs of a plan with paged attention; a chain gets its ancestor words, rows without padding their count."""
    batch, num_nodes = inputs.token_ids.shape
    words = chain_words(batch, num_nodes, inputs.token_ids.device) if inputs.tree_mask is None else inputs.tree_mask
    counts = inputs.num_nodes
    if counts is None:
        counts = torch.full((batch,), num_nodes, device=inputs.token_ids.device)
    tensors = {
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "tree_mask": fitting_words(words, num_nodes),
        "cache_lengths": inputs.cache_lengths,
        "page_table": inputs.page_table,
        "num_nodes": counts,
    }
    return {name: tensor.int().contiguous() for name, tensor in tensors.items()}
