"""Streamed text: the pieces make exactly the whole, whatever the tokenizer, the characters and the grouping."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from furcate.model_repository.text_stream import AnswerText, StopText, TokenText

SAMPLE = "To furcate is to branch. Äpfel, naïve, 日本語のテキスト, 한국어, emoji 🌳🌿👩‍🚀, tabs\tand\nlines."


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen, SmolLM: bytes, merged; a character may be spread over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral, Gemma: words that begin with a space mark, other characters as byte tokens; the first space
    of a text is dropped."""
    words = ["▁", "▁to", "▁branch", "▁is", *"abcdefghijklmnopqrstuvwxyz.,", "▁t", "▁b", "日"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
tokenizer_names = st.sampled_from(sorted(TOKENIZERS))
stories = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd▁"), max_size=40) | st.text(
    "🌳日é a", max_size=20
)


def pieces_of(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> list[str]:
    text = TokenText(tokenizer)
    return [*(text.push(token_id) for token_id in token_ids), text.finish()]


@settings(deadline=None, max_examples=200)
@given(name=tokenizer_names, story=stories)
def test_pieces_of_a_text_make_the_tokenizers_own_text(name: str, story: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(story)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=200)
@given(token_ids=st.lists(st.integers(0, len(TOKENIZERS["byte level"]) - 1), max_size=40))
def test_pieces_of_any_byte_tokens_make_the_tokenizers_own_text(token_ids: list[int]) -> None:
    """Noise too: bytes that are no UTF-8 become U+FFFD in the same places."""
    tokenizer = TOKENIZERS["byte level"]
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_no_piece_breaks_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("a🌳 日本 é")
    pieces = pieces_of(tokenizer, token_ids)
    assert len(token_ids) > len([piece for piece in pieces if piece]) > 3
    assert not any("\ufffd" in piece for piece in pieces)


def test_spaces_between_words_stay() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    vocabulary = tokenizer.get_vocab()
    token_ids = [vocabulary["▁to"], vocabulary["▁branch"], vocabulary["▁"], vocabulary["▁is"]]
    assert pieces_of(tokenizer, token_ids) == ["to", " branch", " ", " is", ""]


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_text_ends_before_the_first_completed_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    stop_text = StopText(stops)
    shown = ""
    for start, end in pairwise(bounds):
        shown += stop_text.push(text[start:end])
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
    shown += stop_text.finish()
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert stop_text.is_stopped == (first is not None)
    assert not any(stop in shown for stop in stops)
    if first is None:
        assert shown == text


@settings(deadline=None, max_examples=100)
@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_character_by_character_the_cut_is_where_a_stop_is_first_complete(text: str, stops: list[str]) -> None:
    stop_text = StopText(stops)
    shown = "".join(stop_text.push(letter) for letter in text) + stop_text.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        completed = min(end for end, _ in ends)
        assert shown == text[: min(start for end, start in ends if end == completed)]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_stop_text_is_found_across_tokens_and_never_shown(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    answer = AnswerText(tokenizer, stops=["nch. x"])
    token_ids = tokenizer.encode("to branch. xyz", add_special_tokens=False)
    pieces = []
    for token_id in token_ids:
        pieces.append(answer.push(token_id))
        if answer.is_stopped:
            break
    assert "".join(pieces) + answer.finish() == "to bra"
    assert answer.num_ids < len(token_ids)


def test_a_stop_in_the_prompt_does_not_stop() -> None:
    tokenizer = TOKENIZERS["byte level"]
    prompt, answer = tokenizer.encode("stop here:"), tokenizer.encode(" go stop go")
    text = AnswerText(tokenizer, stops=["stop"], num_unsearched_ids=len(prompt))
    assert "".join(text.push(token_id) for token_id in prompt + answer) + text.finish() == "stop here: go "
