"""Guided decoding: only tokens that keep a text within a JSON schema, a regular expression or a grammar.

N nodes, M of them reached, V vocabulary. llguidance keeps the state of each text; a step walks it down the tree and back, so
that every node's mask is that of its own path.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from furcate.builder.errors import RequestError
from furcate.decoding.request import Guide, GuideKind
from furcate.decoding.tree import WORD_BITS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Unbounded white space between JSON's tokens lets a greedy text go round in it for ever; this is room for any indentation.
# A schema that speaks for itself under llguidance's "x-guidance" key is left as it is.
_WHITE_SPACE = r"[ \t\n\r]{0,40}"
_ANY_JSON = "{}"
"""The schema that every JSON value meets."""


class GuideCompiler:
    """Makes guides for one engine's vocabulary. Its tokenizer is read at the first guide (about a second)."""

    def __init__(self, tokenizer_dir: Path, end_ids: tuple[int, ...], vocab_size: int) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None

    def compile(self, guide: Guide, end_ids: tuple[int, ...]) -> "TextGuide":
        """The guide of a text that any of `end_ids` may end. Raises RequestError when it cannot be followed."""
        from llguidance import LLMatcher

        if not end_ids:
            raise RequestError("a guide was given but no end_id; a guided text needs a token to end with, so send one.")
        grammar = _grammar_of(guide)
        tokens = self._tokenizer()
        is_wrong, faults = LLMatcher.validate_grammar_with_warnings(grammar, tokens)
        if is_wrong:
            raise _refusal(guide, faults[0])
        return TextGuide(LLMatcher(tokens, grammar, log_level=0), tuple(tokens.eos_tokens), end_ids, self._vocab_size)

    def _tokenizer(self) -> "LLTokenizer":
        if self._tokens is None:
            from llguidance.hf import from_tokenizer
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_dir, trust_remote_code=False)
            ends = list(self._end_ids) or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
            if not isinstance(tokenizer, PreTrainedTokenizerFast) or not ends:
                raise RequestError(
                    "this engine's tokenizer is not a fast one with an end token, so it cannot follow a guide; leave it out."
                )
            self._tokens = from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=ends)
        return self._tokens


class TextGuide:
    """Where one text stands in its grammar: everything emitted so far has been consumed."""

    def __init__(
        self, matcher: "LLMatcher", grammar_end_ids: tuple[int, ...], end_ids: tuple[int, ...], vocab_size: int
    ) -> None:
        self._matcher = matcher
        self._grammar_end_ids = list(grammar_end_ids)
        self._end_ids = list(end_ids)
        self._vocab_size = vocab_size

    def extend(self, new_ids: list[int]) -> None:
        """Consumes tokens just emitted. The text is over at the first that the grammar does not take: an end."""
        self._matcher.try_consume_tokens(new_ids)

    def barred(self, token_ids: list[int], parents: list[int]) -> tuple[list[int], Bool[Tensor, "M V"]]:
        """The M nodes that can be reached, and what may not follow each of them.

        A node whose own token may not follow its parent is never reached, nor is what lies below it. Parents precede children;
        node 0 is the root, which has been consumed. The matcher is left as it was.
        """
        children: list[list[int]] = [[] for _ in token_ids]
        for node in range(len(token_ids) - 1, 0, -1):
            children[parents[node]].append(node)
        words = np.zeros((len(token_ids), -(-self._vocab_size // WORD_BITS)), dtype=np.int32)
        reached, is_accepting = self._walk(token_ids, children, words)
        bits = np.unpackbits(words[: len(reached)].view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        barred = torch.from_numpy(bits == 0)
        barred[:, self._grammar_end_ids] = True
        ends = torch.tensor(self._end_ids)
        barred[:, ends] = barred[:, ends] & ~torch.tensor(is_accepting)[:, None]
        return reached, barred

    def _walk(self, token_ids: list[int], children: list[list[int]], words: np.ndarray) -> tuple[list[int], list[bool]]:
        """The nodes that can be reached and whether the text may end after each; their mask words are filled in turn."""
        from llguidance.numpy import fill_next_token_bitmask

        matcher = self._matcher
        reached: list[int] = []
        is_accepting: list[bool] = []
        # A node is met twice: going down it is consumed, and None takes back the one consumed last.
        ahead: list[int | None] = [0]
        while ahead:
            node = ahead.pop()
            if node is None:
                matcher.rollback(1)
                continue
            if node > 0:
                if matcher.try_consume_tokens([token_ids[node]]) == 0:
                    continue
                ahead.append(None)
            fill_next_token_bitmask(matcher, words, len(reached))
            reached.append(node)
            is_accepting.append(matcher.is_accepting())
            ahead += children[node]
        return reached, is_accepting


def _grammar_of(guide: Guide) -> str:
    from llguidance import LLMatcher, grammar_from

    if guide.kind is GuideKind.REGEX:
        return LLMatcher.grammar_from_regex(guide.text)
    try:
        if guide.kind is GuideKind.EBNF_GRAMMAR:
            return grammar_from("ebnf", guide.text)
        schema = _ANY_JSON if guide.kind is GuideKind.JSON else guide.text
        value = json.loads(schema)
        is_own = isinstance(value, dict) and "x-guidance" in value
        return LLMatcher.grammar_from_json_schema(
            schema, defaults=None if is_own else {"whitespace_pattern": _WHITE_SPACE}
        )
    except ValueError as error:
        raise _refusal(guide, str(error)) from None


def _refusal(guide: Guide, fault: str) -> RequestError:
    reason = " ".join(fault.split())[:300]
    return RequestError(f"the {guide.kind.value} guide cannot be followed ({reason}); send one that is right.")
