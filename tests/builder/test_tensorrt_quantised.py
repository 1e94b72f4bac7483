"""Targets of quantised checkpoints, emitted in their few bits, against the torch executor on the dequantised weights.

Tolerance: 1e-3 on logits of size about 10; both sides compute in float32 and sum in another order.
"""

import pytest
import torch
from emitted_networks import NUM_SLOTS, TargetTwice, chain, emission_context, new_builder, random_tree
from quantised_checkpoints import quantise

from furcate.builder.checkpoints.named import NamedTensors
from furcate.builder.checkpoints.target import TargetCheckpoint, read_target
from furcate.builder.few_bits import bits_per_weight, weight_format
from furcate.builder.network.quantised import QuantisedWeight
from furcate.builder.tensorrt_build import PlanSettings, build_plan
from furcate.builder.tensorrt_networks import emit_target
from furcate.builder.tensorrt_profiles import Buckets, profiles_of

FORMATS = {"modelopt-fp8": "fp8", "compressed-fp8": "fp8", "modelopt-awq": "int4", "compressed-int4": "int4"}


def kept_weights(target: TargetCheckpoint) -> dict[str, QuantisedWeight]:
    """What an engine keeps in few bits."""
    assert isinstance(target.weights, NamedTensors)
    kept = {name: target.weights.quantised(name) for name in bits_per_weight(target)}
    return {name: weight for name, weight in kept.items() if weight is not None}


@pytest.mark.parametrize("layout", FORMATS)
@torch.inference_mode()
def test_logits_are_those_of_the_dequantised_weights(layout, tiny_target, tmp_path):
    quantised, plain = quantise(tiny_target, tmp_path, layout)
    target, expected = read_target(quantised), read_target(plain)
    few_bits = kept_weights(target)
    assert weight_format(few_bits.values()) == FORMATS[layout]
    assert len(few_bits) == 4 * target.spec.num_layers, "qkv, o, gate_up and down of every layer"
    both = TargetTwice(target.spec, dict(expected.weights), taps=(2, 6), few_bits=few_bits)
    kinds = [both.emitted.network.get_layer(index).type.name for index in range(both.emitted.network.num_layers)]
    assert kinds.count("DEQUANTIZE") == len(few_bits)
    ids = torch.randint(2, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    for nodes, lengths in (
        (chain(ids), torch.tensor([0, 0])),
        (random_tree(2, 12, 250, seed=2), torch.tensor([40, 31])),
    ):
        torch_outputs, evaluated = both.run(nodes, lengths)
        assert torch_outputs.logits.abs().max() > 1
        torch.testing.assert_close(evaluated["logits"], torch_outputs.logits, atol=1e-3, rtol=0)
        # The residual stream's entries are larger than the logits: 1e-5 of the largest.
        atol = 1e-5 * float(torch_outputs.features.abs().max())
        torch.testing.assert_close(evaluated["features"], torch_outputs.features, atol=max(atol, 1e-3), rtol=0)


@pytest.mark.parametrize(("layout", "arch"), [("modelopt-fp8", 120), ("compressed-fp8", 120), ("modelopt-fp8", 89)])
def test_rtx_builds_the_target_in_few_bits(layout, arch, tiny_target, tmp_path):
    quantised, _ = quantise(tiny_target, tmp_path, layout)
    target = read_target(quantised)
    few_bits = kept_weights(target)
    context = emission_context(target.spec, torch.bfloat16)
    builder = new_builder(context.tensorrt)
    emitted = emit_target(builder, context, target.spec, {**target.weights, **few_bits}, ())
    layers = [emitted.network.get_layer(index) for index in range(emitted.network.num_layers)]
    constants = [layer.get_output(0).dtype.name for layer in layers if layer.type.name == "CONSTANT"]
    assert constants.count("FP8") == len(few_bits)
    buckets = Buckets(batch_sizes=(1,), tree_nodes=(1, 16), prompt_tokens=64, max_pages=NUM_SLOTS // 16)
    plan = build_plan(builder, emitted, profiles_of(emitted, buckets), PlanSettings(arch=arch))
    assert len(plan) > sum(weight.values.nbytes for weight in few_bits.values())
