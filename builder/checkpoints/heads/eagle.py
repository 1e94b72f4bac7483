"""EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858; one format): fc over (embedding, hidden) and one Llama layer."""

from furcate.builder.checkpoints.heads.checkpoint import HeadCheckpoint
from furcate.builder.checkpoints.heads.decoder_layer import head_decoder
from furcate.builder.checkpoints.heads.source import HeadSource
from furcate.builder.checkpoints.layers import IGNORED_BUFFERS, LayerPlan
from furcate.builder.checkpoints.named import NamedTensors, Part, TensorPlan
from furcate.builder.errors import CheckpointError
from furcate.builder.network.spec import DecoderSpec, HeadKind, HeadSpec


def read_eagle(source: HeadSource) -> HeadCheckpoint:
    """An EAGLE-1/2 head. Its hidden size and vocabulary are the target's; anything else is a CheckpointError."""
    source.check_hidden_size(source.shape("fc.weight")[0], "fc.weight")
    source.check_vocabulary(source.config.get("vocab_size"), "vocab_size in config.json")
    decoder = head_decoder(source, source.config)
    source.check_hidden_size(decoder.hidden_size, "hidden_size in config.json")
    _check_bias(source)
    spec = HeadSpec(
        kind=HeadKind.EAGLE,
        hidden_size=decoder.hidden_size,
        target_hidden_size=source.target.hidden_size,
        vocab_size=source.target.vocab_size,
        draft_vocab_size=source.target.vocab_size,
        feature_layers=(source.target.num_layers,),
        decoder=decoder,
        has_fc_bias="fc.bias" in source.stored,
        owns_embedding="embed_tokens.weight" in source.stored,
        owns_lm_head="lm_head.weight" in source.stored,
    )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in source.stored:
            source.check_vocabulary(source.shape(name)[0], name)
    return HeadCheckpoint(spec, _plan(source, spec, decoder), tuple(source.warnings), source.path)


def _check_bias(source: HeadSource) -> None:
    """`bias` in config.json is about fc; where it is said, the stored tensors must agree."""
    said, stored = source.config.get("bias"), "fc.bias" in source.stored
    if said is not None and bool(said) != stored:
        there = "is" if stored else "is not"
        raise CheckpointError(
            f"{source.path}: config.json has bias: {str(bool(said)).lower()}, but fc.bias {there} stored; export it again."
        )


def _plan(source: HeadSource, spec: HeadSpec, decoder: DecoderSpec) -> NamedTensors:
    plan = TensorPlan(source.stored, source.path)
    hidden = spec.hidden_size
    plan.add("fc.weight", Part("fc.weight", (hidden, 2 * hidden)))
    if spec.has_fc_bias:
        plan.add("fc.bias", Part("fc.bias", (hidden,)))
    layer = LayerPlan(plan, decoder, "layers.0", "layers.0")
    layer.add_attention()
    layer.add_norm("post_norm", "post_attention_layernorm")
    layer.add_mlp()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in source.stored:
            plan.add(name, Part(name, (spec.vocab_size, hidden)))
    return plan.finish(IGNORED_BUFFERS)
