"""TensorRT-RTX builds what is emitted, on the CPU: target and heads for two architectures, in every dtype, with real profiles."""

import pytest
import torch
from emitted_networks import NUM_SLOTS, emission_context, new_builder

from furcate.builder.checkpoints.heads import read_head
from furcate.builder.checkpoints.target import read_target
from furcate.builder.errors import BuildError
from furcate.builder.tensorrt_build import PlanSettings, build_plan
from furcate.builder.tensorrt_networks import EMBEDDING, LM_HEAD, NativeSettings, emit_head, emit_target
from furcate.builder.tensorrt_profiles import Buckets, profiles_of

BUCKETS = Buckets(batch_sizes=(1, 4), tree_nodes=(1, 16), prompt_tokens=64, max_pages=NUM_SLOTS // 16)


def plans(target, head, arch: int, dtype: torch.dtype = torch.bfloat16, num_slots: int = NUM_SLOTS):
    """(name, plan) of every network, built one after the other."""
    tables = {EMBEDDING: (target.spec.vocab_size, target.spec.hidden_size)}
    if not target.spec.is_tied:
        tables[LM_HEAD] = tables[EMBEDDING]
    attention = NativeSettings(num_slots=num_slots)
    context = emission_context(target.spec, dtype, shared_tables=tables, attention=attention)
    builder = new_builder(context.tensorrt)
    weights = {name: target.weights[name] for name in target.weights}
    emitted = [emit_target(builder, context, target.spec, weights, head.spec.feature_layers)]
    head_weights = {name: head.weights[name] for name in head.weights if name != "draft_token_ids"}
    if not head.spec.owns_lm_head:
        rows = target.weights[EMBEDDING if target.spec.is_tied else LM_HEAD]
        head_weights[LM_HEAD] = rows[:64]
    emitted += emit_head(builder, context, head.spec, head_weights)
    for network in emitted:
        profiles = profiles_of(network, BUCKETS)
        yield network.name, build_plan(builder, network, profiles, PlanSettings(arch=arch))


@pytest.mark.parametrize(("kind", "arch", "dtype"), [
    ("eagle3", 120, torch.bfloat16), ("eagle", 80, torch.float16), ("medusa", 120, torch.float16),
    ("medusa", 80, torch.float32),
])  # fmt: skip
def test_target_and_head_build_for_each_architecture(kind, arch, dtype, tiny_target, tiny_heads):
    target = read_target(tiny_target)
    head = read_head(tiny_heads[kind], target=target.spec)
    built = dict(plans(target, head, arch, dtype))
    assert set(built) == {"target", "head"} | ({"fuse"} if kind == "eagle3" else set())
    for plan in built.values():
        assert len(plan) > 10_000


def test_an_architecture_that_rtx_does_not_build_for_is_refused(tiny_target, tiny_heads):
    target = read_target(tiny_target)
    head = read_head(tiny_heads["medusa"], target=target.spec)
    with pytest.raises(BuildError, match=r"does not build for sm_90; it builds for sm_75"):
        list(plans(target, head, 90))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [120, 80])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_the_example_model_and_its_heads_build(kind, arch, example_model, request):
    target = read_target(example_model)
    head = read_head(request.config.rootpath / "examples" / "heads" / kind, target=target.spec)
    built = dict(plans(target, head, arch))
    assert len(built["target"]) > 150_000_000  # 106 million parameters outside the shared embedding, two bytes each
