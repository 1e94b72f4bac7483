"""EAGLE-3 heads (arXiv 2503.01840): SafeAILab, SpecForge and AngelSlim (`midlayer.*`), speculators and modelopt (`layers.0.*`)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from furcate.builder.checkpoints.heads.checkpoint import HeadCheckpoint
from furcate.builder.checkpoints.heads.decoder_layer import head_decoder
from furcate.builder.checkpoints.heads.draft_vocabulary import draft_token_ids
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.heads.taps import feature_layers
from furcate.builder.checkpoints.layers import IGNORED_BUFFERS, LayerPlan
from furcate.builder.checkpoints.named import NamedTensors, Part, TensorPlan
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec, HeadKind, HeadSpec

# d2t and t2d are read by draft_vocabulary; verifier_* are copies of the target's tensors.
_IGNORED = (*IGNORED_BUFFERS, "d2t", "t2d", r"verifier_norm\.weight", r"verifier_lm_head\.weight")
# modelopt's variants of the layer, and the one value that is plain EAGLE-3.
_PLAIN_EAGLE3 = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


def read_eagle3(source: HeadSource) -> HeadCheckpoint:
    """An EAGLE-3 head. Raises CheckpointError for variants that are not plain EAGLE-3 and for whatever does not fit the target."""
    _refuse_variants(source)
    layer_config, is_speculators = _layer_config(source)
    decoder = head_decoder(source, layer_config)
    source.check_vocabulary(layer_config.get("vocab_size"), "vocab_size in config.json")
    _check_fc(source, decoder)
    draft_size = _draft_size(source, decoder)
    ids = draft_token_ids(source, draft_size)
    spec = HeadSpec(
        kind=HeadKind.EAGLE3,
        hidden_size=decoder.hidden_size,
        target_hidden_size=source.target.hidden_size,
        vocab_size=source.target.vocab_size,
        draft_vocab_size=draft_size if ids is None else len(ids),
        feature_layers=feature_layers(source, is_expected=is_speculators or "eagle_config" in source.config),
        decoder=decoder,
        has_fc_bias="fc.bias" in source.stored,
        has_fc_norm=bool(source.setting("norm_before_fc", False)),
        has_tap_norms=bool(source.setting("fc_norm", False)),
        has_norm_before_residual=bool(source.setting("norm_before_residual", False)),
        feeds_back_normed=is_speculators and bool(source.setting("norm_output", False)),
        owns_embedding="embed_tokens.weight" in source.stored,
        owns_lm_head="lm_head.weight" in source.stored,
    )
    _refuse_unusable(source, spec)
    return HeadCheckpoint(spec, _plan(source, spec, decoder, (draft_size, ids)), tuple(source.warnings), source.path)


def _refuse_variants(source: HeadSource) -> None:
    for name, plain in _PLAIN_EAGLE3.items():
        value = source.setting(name, plain)
        if value != plain:
            raise CheckpointError(
                f"{source.path}: config.json has {name}: {value}; only {plain} (plain EAGLE-3) is supported."
            )


def _layer_config(source: HeadSource) -> tuple[dict[str, Any], bool]:
    """The configuration of the head's layer, and whether it is speculators' (nested)."""
    is_speculators = "speculators_model_type" in source.config
    if is_speculators:
        return dict(source.config.get("transformer_layer_config") or {}), True
    if source.setting("norm_output", True) is False:
        raise CheckpointError(
            f"{source.path}: config.json has norm_output: false (no norm before lm_head); only heads with that norm are supported."
        )
    return source.config, False


def _check_fc(source: HeadSource, decoder: DecoderSpec) -> None:
    rows, columns = source.shape("fc.weight")
    said = source.setting("target_hidden_size")
    if said is not None:
        source.check_hidden_size(said, "target_hidden_size in config.json")
    if rows != decoder.hidden_size:
        raise CheckpointError(
            f"{source.path}: fc.weight has {rows} rows where config.json has hidden_size {decoder.hidden_size}."
        )
    named = source.setting("eagle_aux_hidden_state_layer_ids")
    num_taps = len(named) if named else 3
    hidden = source.target.hidden_size
    if columns != num_taps * hidden:
        if rows == hidden and columns % hidden == 0:
            raise CheckpointError(
                f"{source.path}: fc.weight reads {columns // hidden} target layers, but config.json names "
                f"{named or 'none'} (eagle_aux_hidden_state_layer_ids); the two must agree."
            )
        source.check_hidden_size(columns // num_taps, "fc.weight")


def _draft_size(source: HeadSource, decoder: DecoderSpec) -> int:
    """Rows of the head's lm_head; the target's vocabulary when the head borrows the target's."""
    said = source.setting("draft_vocab_size")
    if "lm_head.weight" not in source.stored:
        if said is not None and said != source.target.vocab_size:
            raise CheckpointError(
                f"{source.path}: config.json has draft_vocab_size {said}, but there is no lm_head.weight; export it again."
            )
        source.check_hidden_size(decoder.hidden_size, "a head without its own lm_head")
        return source.target.vocab_size
    rows = source.shape("lm_head.weight")[0]
    if said is not None and said != rows:
        raise CheckpointError(
            f"{source.path}: lm_head.weight has {rows} rows where config.json has draft_vocab_size {said}; export it again."
        )
    return rows


def _refuse_unusable(source: HeadSource, spec: HeadSpec) -> None:
    if spec.has_fc_norm and spec.has_tap_norms:
        raise CheckpointError(
            f"{source.path}: config.json has both norm_before_fc and fc_norm; only one of them can hold."
        )
    if spec.owns_embedding:
        source.check_vocabulary(source.shape("embed_tokens.weight")[0], "embed_tokens.weight")
    else:
        source.check_hidden_size(spec.hidden_size, "a head without its own embed_tokens")


def _plan(source: HeadSource, spec: HeadSpec, decoder: DecoderSpec, draft: tuple[int, Tensor | None]) -> NamedTensors:
    plan = TensorPlan(source.stored, source.path)
    hidden, features = spec.hidden_size, len(spec.feature_layers) * spec.target_hidden_size
    plan.add("fc.weight", Part("fc.weight", (hidden, features)))
    if spec.has_fc_bias:
        plan.add("fc.bias", Part("fc.bias", (hidden,)))
    if spec.has_fc_norm:
        plan.add("fc_norm.weight", Part("input_norm.weight", (features,)))
    if spec.has_tap_norms:
        for tap in range(len(spec.feature_layers)):
            plan.add(f"tap_norms.{tap}.weight", Part(f"fc_norm.{tap}.weight", (spec.target_hidden_size,)))
    layer = LayerPlan(plan, decoder, "layers.0", "layers.0")
    for name, stored in (
        ("hidden_norm",) * 2,
        ("input_norm", "input_layernorm"),
        ("post_norm", "post_attention_layernorm"),
    ):
        layer.add_norm(name, stored)
    layer.add_attention(input_size=2 * hidden)
    layer.add_mlp()
    plan.add("norm.weight", Part("norm.weight", (hidden,)))
    if spec.owns_embedding:
        plan.add("embed_tokens.weight", Part("embed_tokens.weight", (spec.vocab_size, hidden)))
    stored_rows, ids = draft
    if spec.owns_lm_head:
        pick = _first_rows(spec.draft_vocab_size) if spec.draft_vocab_size < stored_rows else None
        plan.add("lm_head.weight", Part("lm_head.weight", (stored_rows, hidden), pick))
    if ids is not None:
        plan.add_tensor("draft_token_ids", ids)
    return plan.finish(_IGNORED)


def _first_rows(count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[:count]
