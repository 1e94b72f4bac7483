"""The specification against the kernels whose arguments it names."""

import pytest

from furcate.plugins.specification import CACHE_COMMIT, SPECIFICATIONS, TREE_ATTENTION_REDUCE, TREE_ATTENTION_SPLIT

pytest.importorskip("triton", reason="pip install 'furcate[gpu]'")

from furcate.plugins.cache_commit.kernel import cache_commit
from furcate.plugins.tree_attention.kernel import tree_attention_reduce, tree_attention_split


@pytest.mark.parametrize(
    ("specification", "kernel"),
    [
        (TREE_ATTENTION_SPLIT, tree_attention_split),
        (TREE_ATTENTION_REDUCE, tree_attention_reduce),
        (CACHE_COMMIT, cache_commit),
    ],
)
def test_kernel_takes_inputs_scalars_outputs_then_constants(specification, kernel):
    arguments = specification.kernel_arguments
    assert tuple(kernel.arg_names[: len(arguments)]) == arguments
    assert all(name.isupper() for name in kernel.arg_names[len(arguments) :])


def test_names_are_unique_within_a_plugin():
    for specification in SPECIFICATIONS:
        entries = (*specification.inputs, *specification.outputs, *specification.attributes)
        names = [entry.name for entry in entries]
        assert len(names) == len(set(names))
