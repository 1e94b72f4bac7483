"""Hydra heads (arXiv 2402.05109): Medusa heads that also read the embeddings of the tokens drafted before theirs.

Stored names are those of zankner/Hydra: `hydra_mlp.{i}.{k}.linear.*`, in the first block of a grounded head
`res_connection.*` (its residual is a projection, because it narrows H (i + 2) to H), `hydra_lm_head.{i}.*`. In prefix-mlp heads
a Dropout sits before every module, so k counts 1, 3, ... and the vocabulary head is `hydra_lm_head.{i}.1.*`.
"""

import re
from dataclasses import replace

from furcate.builder.checkpoints.heads.checkpoint import HeadCheckpoint
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.layers import IGNORED_BUFFERS, LayerPlan
from furcate.builder.checkpoints.named import NamedTensors, Part, TensorPlan
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec, HeadKind, HeadSpec

_ARCHITECTURES = ("mlp", "prefix-mlp")
_PREFIX = "prefix_embeding_layer"  # spelt so in the checkpoints
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


def read_hydra(source: HeadSource) -> HeadCheckpoint:
    """Hydra heads of the architectures mlp and prefix-mlp; the two attention ones are refused."""
    architecture = source.config.get("hydra_head_arch", "mlp")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{source.path} has hydra_head_arch '{architecture}'; supported are {' and '.join(_ARCHITECTURES)}."
        )
    has_prefix = architecture == "prefix-mlp"
    num_heads, num_blocks = _count(source)
    source.check_hidden_size(source.shape(_lm_head(0, has_prefix) + ".weight")[1], "hydra_lm_head")
    source.check_vocabulary(source.shape(_lm_head(0, has_prefix) + ".weight")[0], "hydra_lm_head")
    offset = source.config.get("hidden_state_offset", 0)
    spec = HeadSpec(
        kind=HeadKind.HYDRA,
        hidden_size=source.target.hidden_size,
        target_hidden_size=source.target.hidden_size,
        vocab_size=source.target.vocab_size,
        draft_vocab_size=source.target.vocab_size,
        feature_layers=(source.target.num_layers - offset,),
        decoder=_prefix_decoder(source.target) if has_prefix else None,
        num_heads=num_heads,
        num_blocks=num_blocks,
        owns_lm_head=True,
        has_prefix_layer=has_prefix,
        is_grounded=bool(source.config.get("grounded_heads", False)),
    )
    return HeadCheckpoint(spec, _plan(source, spec), tuple(source.warnings), source.path)


def _count(source: HeadSource) -> tuple[int, int]:
    """(heads, blocks per head), counted from the stored names."""
    found = [match for name in source.stored if (match := _BLOCK.fullmatch(name))]
    heads = 1 + max(int(match[1]) for match in found)
    blocks = len(found) // heads
    said = source.config.get("hydra_num_heads", heads)
    if said != heads:
        source.warnings.append(f"config.json says {said} Hydra heads, but {heads} are stored: {heads} are used.")
    return heads, blocks


def _prefix_decoder(target: DecoderSpec) -> DecoderSpec:
    """The prefix layer: one layer of the target's own shape."""
    return replace(target, num_layers=1, is_tied=False, bos_token_id=None, eos_token_ids=())


def _lm_head(head: int, has_prefix: bool) -> str:
    return f"hydra_lm_head.{head}.1" if has_prefix else f"hydra_lm_head.{head}"


def _plan(source: HeadSource, spec: HeadSpec) -> NamedTensors:
    plan = TensorPlan(source.stored, source.path)
    for i in range(spec.num_heads):
        _add_head(plan, spec, i)
    if spec.decoder is not None:
        layer = LayerPlan(plan, spec.decoder, "layers.0", f"{_PREFIX}.layers.0")
        layer.add_norm("input_norm", "input_layernorm")
        layer.add_attention()
        layer.add_norm("post_norm", "post_attention_layernorm")
        layer.add_mlp()
        plan.add("norm.weight", Part(f"{_PREFIX}.norm.weight", (spec.hidden_size,)))
    # The prefix is fed hidden states; its embedding was never used.
    return plan.finish((*IGNORED_BUFFERS, rf"{_PREFIX}\.embed_tokens\.weight"))


def _add_head(plan: TensorPlan, spec: HeadSpec, i: int) -> None:
    hidden = spec.hidden_size
    for j in range(spec.num_blocks):
        stored = f"hydra_mlp.{i}.{2 * j + 1 if spec.has_prefix_layer else j}"
        is_wide = spec.is_grounded and j == 0
        columns = hidden * (i + 2) if is_wide else hidden
        parts = {"linear": f"heads.{i}.blocks.{j}"} | ({"res_connection": f"heads.{i}.residual"} if is_wide else {})
        for part, name in parts.items():
            plan.add(f"{name}.weight", Part(f"{stored}.{part}.weight", (hidden, columns)))
            plan.add(f"{name}.bias", Part(f"{stored}.{part}.bias", (hidden,)))
    lm_head = _lm_head(i, spec.has_prefix_layer)
    plan.add(f"heads.{i}.lm_head.weight", Part(f"{lm_head}.weight", (spec.vocab_size, hidden)))
    if f"{lm_head}.bias" in plan.stored:
        plan.add(f"heads.{i}.lm_head.bias", Part(f"{lm_head}.bias", (spec.vocab_size,)))
