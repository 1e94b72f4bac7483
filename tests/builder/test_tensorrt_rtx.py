"""TensorRT-RTX builds what is emitted, on the CPU: target and heads for two architectures, in every dtype, with real profiles."""

import pytest
import torch
from emitted_networks import NUM_SLOTS, emission_context, new_builder

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.checkpoints.target import read_target
from furcate.builder.errors import BuildError
from furcate.builder.tensorrt_build import PlanSettings, build_plan
from furcate.builder.tensorrt_networks import EMBEDDING, LM_HEAD, emit_head, emit_target
from furcate.builder.tensorrt_profiles import Buckets, profiles_of

BUCKETS = Buckets(batch_sizes=(1,), tree_nodes=(1, 16), prompt_tokens=64, max_pages=NUM_SLOTS // 16)


def emitted(target, heads, dtype: torch.dtype):
    """(builder, networks) of the target and of every head."""
    tables = {EMBEDDING: (target.spec.vocab_size, target.spec.hidden_size)}
    if not target.spec.is_tied:
        tables[LM_HEAD] = tables[EMBEDDING]
    context = emission_context(target.spec, dtype, shared_tables=tables)
    builder = new_builder(context.tensorrt)
    weights = {name: target.weights[name] for name in target.weights}
    networks = [emit_target(builder, context, target.spec, weights, heads[0].spec.feature_layers)]
    for head in heads:
        head_weights = {name: head.weights[name] for name in head.weights if name != "draft_token_ids"}
        if not head.spec.owns_lm_head:
            head_weights[LM_HEAD] = target.weights[EMBEDDING if target.spec.is_tied else LM_HEAD][:64]
        networks += emit_head(builder, context, head.spec, head_weights)
    return builder, networks


def plan_of(builder, network, arch: int) -> bytes:
    return build_plan(builder, network, profiles_of(network, BUCKETS), PlanSettings(arch=arch))


@pytest.mark.parametrize(("kind", "arch", "dtype"), [
    ("eagle3", 120, torch.bfloat16), ("eagle", 80, torch.float16), ("medusa", 80, torch.float32),
])  # fmt: skip
def test_target_and_head_build_for_each_architecture(kind, arch, dtype, tiny_target, tiny_heads):
    target = read_target(tiny_target)
    builder, networks = emitted(target, [read_head(tiny_heads[kind], target=target.spec)], dtype)
    names = ["target", "head"] + ([] if kind == "medusa" else ["logits"]) + (["fuse"] if kind == "eagle3" else [])
    assert [network.name for network in networks] == names
    for network in networks:
        values = sum(tensor.nbytes for tensor in network.graph.kept if tensor.numel() > 1000)
        assert len(plan_of(builder, network, arch)) > values, "a plan holds its weights"


def test_an_architecture_that_rtx_does_not_build_for_is_refused(tiny_target, tiny_heads):
    target = read_target(tiny_target)
    builder, networks = emitted(target, [read_head(tiny_heads["medusa"], target=target.spec)], torch.float32)
    with pytest.raises(BuildError, match=r"does not build for sm_90; it builds for sm_75"):
        plan_of(builder, networks[-1], 90)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [120, 80])
def test_the_example_model_and_its_heads_build(arch, example_model, request):
    target = read_target(example_model)
    folder = request.config.rootpath / "examples" / "heads"
    heads = [read_head(folder / kind, target=target.spec) for kind in ("eagle3", "eagle", "medusa")]
    builder, networks = emitted(target, heads, torch.bfloat16)
    sizes = [len(plan_of(builder, network, arch)) for network in networks]
    assert sizes[0] > 2 * 100_000_000, "106 million parameters outside the shared embedding, two bytes each"
