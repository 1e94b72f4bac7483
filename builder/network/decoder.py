"""The one definition of a decoder target, written against `ops`.

Axes: B batch, N nodes, H hidden, V vocabulary, F feature width. A prompt chunk is a chain-shaped tree, a plain decoding step is a
single node: prefill, decode and verification are this one function.
"""

from furcate.builder.network.inputs import Array, PassInputs, TargetOutputs
from furcate.builder.network.spec import DecoderSpec
from furcate.builder.ops.protocol import Ops
from furcate.plugins.tree_attention.spec import AttentionSpec


def attention_spec(spec: DecoderSpec, is_local: bool = False) -> AttentionSpec:
    """The attention of a global layer, or of a sliding-window layer when `is_local`."""
    return AttentionSpec(
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
        sliding_window=spec.sliding_window if is_local else None,
        norm_eps=spec.norm_eps,
    )


def is_local_layer(spec: DecoderSpec, layer: int) -> bool:
    """True when this layer attends only the last `sliding_window` tokens."""
    if spec.sliding_window is None:
        return False
    return spec.sliding_layers is None or layer in spec.sliding_layers


def mlp(ops: Ops, spec: DecoderSpec, prefix: str, x: Array, residual: Array | None) -> Array:
    """The gated MLP, or the mixture of experts, of one layer: [..., H] -> [..., H]."""
    if spec.num_experts is not None:
        out = ops.experts(prefix, x, spec)
        return out if residual is None else ops.add(residual, out)
    hidden = ops.gated_activation(ops.linear(f"{prefix}.gate_up", x), spec.activation)
    return ops.linear(f"{prefix}.down", hidden, residual=residual)


def decoder_layer(ops: Ops, spec: DecoderSpec, layer: int, x: Array, plan: object) -> Array:
    """One pre-norm decoder layer on the residual stream x [B,N,H]."""
    prefix = f"layers.{layer}"
    offset = spec.has_unit_offset_norm
    normed = ops.rms_norm(f"{prefix}.input_norm", x, spec.norm_eps, offset)
    attended = ops.tree_attention(prefix, layer, ops.linear(f"{prefix}.qkv", normed), plan)
    if not spec.has_sandwich_norms:
        x = ops.linear(f"{prefix}.o", attended, residual=x)
        return mlp(ops, spec, prefix, ops.rms_norm(f"{prefix}.post_norm", x, spec.norm_eps, offset), x)
    attended = ops.rms_norm(f"{prefix}.attention_out_norm", ops.linear(f"{prefix}.o", attended), spec.norm_eps, offset)
    x = ops.add(x, attended)
    out = mlp(ops, spec, prefix, ops.rms_norm(f"{prefix}.post_norm", x, spec.norm_eps, offset), None)
    return ops.add(x, ops.rms_norm(f"{prefix}.mlp_out_norm", out, spec.norm_eps, offset))


def target_logits(ops: Ops, spec: DecoderSpec, hidden: Array) -> Array:
    """Next-token logits [..., V] of final-normed hidden states [..., H]."""
    logits = ops.linear("lm_head", hidden)
    return logits if spec.logit_softcap is None else ops.softcap(logits, spec.logit_softcap)


def run_target(
    ops: Ops,
    spec: DecoderSpec,
    inputs: PassInputs,
    feature_layers: tuple[int, ...] = (),
    logit_rows: Array | None = None,
) -> TargetOutputs:
    """Logits and features of one target pass; K/V of all nodes is written behind the committed tokens.

    `feature_layers` are taps in the input-of-layer convention; tap `num_layers` is the final-normed hidden state.
    `logit_rows` [B,R] restricts the vocabulary projection to these nodes (a prompt chunk wants only its last).
    """
    x = ops.embedding("embed_tokens", inputs.token_ids)
    if spec.embedding_scale is not None:
        x = ops.scale(x, spec.embedding_scale)
    plans: dict[bool, object] = {}
    taps: dict[int, Array] = {}
    for layer in range(spec.num_layers):
        if layer in feature_layers:
            taps[layer] = x
        is_local = is_local_layer(spec, layer)
        if is_local not in plans:
            plans[is_local] = ops.plan(inputs, attention_spec(spec, is_local), is_local)
        x = decoder_layer(ops, spec, layer, x, plans[is_local])
    hidden = ops.rms_norm("norm", x, spec.norm_eps, spec.has_unit_offset_norm)
    taps[spec.num_layers] = hidden
    features = [taps[layer] for layer in feature_layers]
    rows = hidden if logit_rows is None else ops.take_rows(hidden, logit_rows)
    return TargetOutputs(
        logits=target_logits(ops, spec, rows),
        features=None if not features else features[0] if len(features) == 1 else ops.concat(features),
    )
