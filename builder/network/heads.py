"""The one definition of every head, written against `ops` (the head's own weights).

Axes: B batch, N nodes, H hidden size of the head, F feature width, Vd draft vocabulary.
Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840), Medusa (arXiv 2401.10774), Hydra (arXiv 2402.05109).
"""

from furcate.builder.network.decoder import attention_spec, decoder_layer, is_local_layer, mlp
from furcate.builder.network.inputs import Array, PassInputs
from furcate.builder.network.spec import HeadKind, HeadSpec
from furcate.builder.ops.protocol import Ops


def eagle_fuse(ops: Ops, head: HeadSpec, features: Array) -> Array:
    """The hidden state [..., H] that the head's recurrence starts from, of target features [..., F]."""
    if head.kind is HeadKind.EAGLE:
        return features
    if head.has_fc_norm:
        assert head.decoder is not None
        features = ops.rms_norm("fc_norm", features, head.decoder.norm_eps)
    if head.has_tap_norms:
        assert head.decoder is not None
        taps = ops.split(features, len(head.feature_layers))
        eps = head.decoder.norm_eps
        features = ops.concat([ops.rms_norm(f"tap_norms.{k}", tap, eps) for k, tap in enumerate(taps)])
    return ops.linear("fc", features)


def eagle_layer(ops: Ops, head: HeadSpec, hidden: Array, embedding: Array, inputs: PassInputs) -> Array:
    """The next recurrent hidden state [B,N,H] of (hidden state, embedding of the token after it), both [B,N,H]."""
    spec = head.decoder
    assert spec is not None, "EAGLE heads have a decoder layer"
    plan = ops.plan(inputs, attention_spec(spec), False)
    if head.kind is HeadKind.EAGLE:
        residual = ops.linear("fc", ops.concat([embedding, hidden]))
        normed = residual
    else:
        normed_hidden = ops.rms_norm("layers.0.hidden_norm", hidden, spec.norm_eps)
        normed = ops.concat([ops.rms_norm("layers.0.input_norm", embedding, spec.norm_eps), normed_hidden])
        residual = normed_hidden if head.has_norm_before_residual else hidden
    attended = ops.tree_attention("layers.0", 0, ops.linear("layers.0.qkv", normed), plan)
    x = ops.linear("layers.0.o", attended, residual=residual)
    x = mlp(ops, spec, "layers.0", ops.rms_norm("layers.0.post_norm", x, spec.norm_eps), x)
    return ops.rms_norm("norm", x, spec.norm_eps) if head.feeds_back_normed else x


def eagle_logits(ops: Ops, head: HeadSpec, hidden: Array) -> Array:
    """Draft logits [..., Vd] of recurrent hidden states [..., H]."""
    if head.kind is HeadKind.EAGLE3 and not head.feeds_back_normed:
        assert head.decoder is not None
        hidden = ops.rms_norm("norm", hidden, head.decoder.norm_eps)
    return ops.linear("lm_head", hidden)


def medusa_logits(ops: Ops, head: HeadSpec, hidden: Array) -> list[Array]:
    """Draft logits [..., Vd] of each Medusa head, of the last hidden state [..., H]; head i predicts the token at t+2+i."""
    logits = []
    for i in range(head.num_heads):
        x = hidden
        for j in range(head.num_blocks):
            x = ops.add(x, ops.silu(ops.linear(f"heads.{i}.blocks.{j}", x)))
        own = f"heads.{i}.lm_head"
        logits.append(ops.linear(own if ops.has_weight(own) else "lm_head", x))
    return logits


def hydra_prefix(ops: Ops, head: HeadSpec, hidden: Array, inputs: PassInputs) -> Array:
    """The hidden states [B,N,H] that prefix-mlp heads read, of the target's: one more decoder layer, then a norm."""
    spec = head.decoder
    assert spec is not None, "prefix-mlp heads have a decoder layer"
    is_local = is_local_layer(spec, 0)
    plan = ops.plan(inputs, attention_spec(spec, is_local), is_local)
    return ops.rms_norm("norm", decoder_layer(ops, spec, 0, hidden, plan), spec.norm_eps, spec.has_unit_offset_norm)


def hydra_logits(ops: Ops, head: HeadSpec, i: int, path: Array) -> Array:
    """Draft logits [..., V] of Hydra's head i, for the token after the i-th drafted one (the 0th is the root).

    `path` is the hidden state and, where heads are grounded, the embeddings of the i + 1 tokens from the root on, side by
    side: [..., H (i + 2)].
    """
    x = path
    for j in range(head.num_blocks):
        residual = ops.linear(f"heads.{i}.residual", x) if j == 0 and head.is_grounded else x
        x = ops.add(residual, ops.silu(ops.linear(f"heads.{i}.blocks.{j}", x)))
    return ops.linear(f"heads.{i}.lm_head", x)
