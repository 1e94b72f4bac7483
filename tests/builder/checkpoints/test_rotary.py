"""RopeSpec of every kind of scaling, as transformers 4 and 5 write it."""

import pytest
from transformers import AutoConfig

from furcate.builder.checkpoints.rotary import describe_rope, rope_spec
from furcate.builder.network.spec import RopeKind, RopeSpec

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 512},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 512},
}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 2048}


@pytest.mark.parametrize("kind", SCALINGS)
def test_both_spellings_give_the_same_rope(kind):
    # phi3 is the family that longrope was made for, and it keeps the original length at the top.
    model_type = "phi3" if kind == "longrope" else "llama"
    top = {"original_max_position_embeddings": 512} if kind == "longrope" else {}
    new = {"rope_type": kind, "rope_theta": 50000.0, **SCALINGS[kind]}
    old = {"type": kind, **{name: value for name, value in SCALINGS[kind].items() if name not in top}}
    expected = RopeSpec(kind=RopeKind(kind), theta=50000.0, parameters=SCALINGS[kind])
    assert rope_spec(AutoConfig.for_model(model_type, **SIZES, **top, rope_parameters=new)) == expected
    scaling = {"rope_scaling": old if kind != "default" else None}
    assert rope_spec(AutoConfig.for_model(model_type, **SIZES, **top, rope_theta=50000.0, **scaling)) == expected


def test_theta_that_nobody_wrote_is_llamas():
    assert rope_spec(AutoConfig.for_model("llama", **SIZES)) == RopeSpec(theta=10000.0)


def test_description_names_kind_theta_and_factor():
    assert describe_rope(RopeSpec(kind=RopeKind.LINEAR, theta=5e5, parameters={"factor": 4.0})) == (
        "linear, theta 500000, factor 4"
    )
