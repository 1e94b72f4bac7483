"""The grammar's state of every node is that of its own path, and walking the tree leaves no trace."""

import pytest
import torch

from furcate.builder.engine import read_engine
from furcate.decoding.logits.guide import GuideCompiler
from furcate.decoding.request import Guide, GuideKind

VOCAB = 300
END = 1
LETTERS = {letter: 2 + sorted("".join(map(chr, range(33, 127)))).index(letter) for letter in "abcdxyz-0123"}
"""Ids in the tiny target's byte-level vocabulary, whose first letters are ASCII's in order."""


@pytest.fixture(scope="module")
def compiler(tiny_engine) -> GuideCompiler:
    return GuideCompiler(read_engine(tiny_engine("eagle3")).tokenizer_dir, (END,), VOCAB)


def allowed_after(compiler: GuideCompiler, guide: Guide, text: str, end_ids: tuple[int, ...]) -> torch.Tensor:
    """What may follow a text, from a guide that has read nothing else."""
    fresh = compiler.compile(guide, end_ids)
    if text:
        fresh.extend([LETTERS[letter] for letter in text])
    reached, barred = fresh.barred([0], [0])
    assert reached == [0]
    return ~barred[0]


@pytest.mark.parametrize("end_ids", [(END,), (7, END), (9,)])
def test_each_node_allows_what_a_fresh_guide_allows_after_its_path(compiler, end_ids):
    guide = Guide(kind=GuideKind.REGEX, text="(ab|ac)+-[0-3]{2}")
    text = compiler.compile(guide, end_ids)
    text.extend([LETTERS["a"]])
    #        root  1    2    3    4    5    6    7    8 (x is not allowed, and what is below it is not reached)
    letters = ["a", "b", "a", "c", "-", "0", "1", "x", "b"]
    parents = [0, 0, 1, 2, 3, 4, 5, 0, 7]
    paths = ["a", "ab", "aba", "abac", "abac-", "abac-0", "abac-01"]
    for _ in range(2):
        reached, barred = text.barred([LETTERS[letter] for letter in letters], parents)
        assert sorted(reached) == list(range(len(paths)))
        found = {node: ~row for node, row in zip(reached, barred, strict=True)}
        for node, path in enumerate(paths):
            assert torch.equal(found[node], allowed_after(compiler, guide, path, end_ids))
    ends = found[6].nonzero().flatten().tolist()
    assert ends == sorted(end_ids), "the whole text is written: only its ends may follow"
    assert not found[0][list(end_ids)].any()


def test_ends_that_the_target_knows_but_the_request_does_not_are_barred(compiler):
    guide = Guide(kind=GuideKind.REGEX, text="a+")
    found = allowed_after(compiler, guide, "a", (9,))
    assert not found[END]
    assert found[9]
    assert found[LETTERS["a"]]


def test_white_space_between_json_tokens_is_bounded_unless_the_schema_speaks_for_itself(compiler):
    space = 2 + 188 + 32  # the byte-level alphabet spells a space with a letter behind the printable ones
    for schema, most in (
        ('{"type": "array"}', 40),
        ('{"type": "array", "x-guidance": {"whitespace_flexible": false}}', 0),
    ):
        guide = compiler.compile(Guide(kind=GuideKind.JSON_SCHEMA, text=schema), (END,))
        guide.extend([2 + ord("[") - 33])
        count = 0
        while not guide.barred([0], [0])[1][0, space] and count < 100:
            guide.extend([space])
            count += 1
        assert count == most
