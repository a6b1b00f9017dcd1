"""Text comes out whole, whatever way it was cut into tokens."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.text.detokenizer import WINDOW_TOKENS, Detokenizer

Decode = Callable[[Sequence[int]], str]


def _byte_level() -> Tokenizer:
    """A byte-level tokenizer in which every token is one byte, and a few are two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    merges = [("Ġ", "a"), ("ä", "½"), ("ð", "Ł"), ("a", "b")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _llama2() -> Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces as `▁`, unknown characters as byte tokens, the first space dropped."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", "a", "b", "é", "▁a", "▁hello", "lo", "好"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


BYTES = _byte_level()
LLAMA2 = _llama2()


def _decode(tokenizer: Tokenizer) -> Decode:
    return lambda tokens: tokenizer.decode(list(tokens))


def _pieces(decode: Decode, tokens: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context=context)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=300))
def test_pieces_of_any_bytes_add_up_to_the_decoding_of_the_whole(tokens: list[int]) -> None:
    """Models do emit broken bytes; not a character may be lost, doubled or changed for it."""
    assert "".join(_pieces(_decode(BYTES), tokens)) == BYTES.decode(tokens)


@given(st.text(max_size=80))
def test_pieces_of_any_text_never_hold_half_a_character(text: str) -> None:
    """A client that shows pieces as they come must never show a broken character that is whole in the end."""
    tokens = BYTES.encode(text).ids
    pieces = _pieces(_decode(BYTES), tokens)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@given(st.text(alphabet="ab éàλ好你🎉👩‍👧", max_size=60))
def test_pieces_with_byte_fallback_add_up_to_the_decoding_of_the_whole(text: str) -> None:
    """Llama 2 spells what it doesn't know in byte tokens and drops the first space; both must survive the cutting."""
    tokens = LLAMA2.encode(text.replace(" ", "▁")).ids
    assert "".join(_pieces(_decode(LLAMA2), tokens)) == LLAMA2.decode(tokens)


@given(st.lists(st.integers(0, LLAMA2.get_vocab_size() - 1), max_size=200))
def test_pieces_with_broken_byte_fallback_stay_bounded_and_complete(tokens: list[int]) -> None:
    """Broken byte runs can't be shown exactly once their good part is out, but every other character must come through."""
    whole, shown = LLAMA2.decode(tokens), "".join(_pieces(_decode(LLAMA2), tokens))
    for letter in "abé":
        assert shown.count(letter) >= whole.count(letter)


@given(st.text(max_size=20), st.text(max_size=40))
def test_pieces_after_a_context_continue_its_text(before: str, text: str) -> None:
    """A completion continues the prompt: together they must read as if decoded in one go."""
    context, tokens = BYTES.encode(before).ids, BYTES.encode(text).ids
    assert before + "".join(_pieces(_decode(BYTES), tokens, context)) == before + text


def test_first_word_after_a_context_keeps_its_space() -> None:
    """Without context a Llama 2 decoder drops the first space and glues the answer to the prompt."""
    hello, a = LLAMA2.get_vocab()["▁hello"], LLAMA2.get_vocab()["a"]
    assert "".join(_pieces(_decode(LLAMA2), [hello], context=[a])) == " hello"
    assert "".join(_pieces(_decode(LLAMA2), [hello])) == "hello"


def test_context_that_ends_inside_a_character_is_left_out() -> None:
    """A prompt of token ids may end in half a character; its broken half must not swallow the answer."""
    half = BYTES.encode("好").ids[:1]
    assert "".join(_pieces(_decode(BYTES), BYTES.encode("ab").ids, context=half)) == "ab"


@pytest.mark.parametrize("text", ["🎉", "你好", "👩‍👩‍👧‍👦", "é", "a🎉b"])
def test_character_over_several_tokens_comes_out_once_complete(text: str) -> None:
    """Nothing of a character is shown before its last byte, and then all of it."""
    tokens = BYTES.encode(text).ids
    pieces = [piece for piece in _pieces(_decode(BYTES), tokens) if piece]
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


def test_window_over_endless_broken_bytes_stays_bounded() -> None:
    """A model stuck on broken bytes must cost neither memory nor quadratic time."""
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return BYTES.decode(list(tokens))

    broken = [BYTES.encode("好").ids[0]] * 500
    assert "".join(_pieces(decode, broken)) == BYTES.decode(broken)
    assert longest <= WINDOW_TOKENS + 1


def test_skipped_token_has_no_text_and_splits_no_character() -> None:
    """Special tokens are not text; one between two halves of a character changes nothing."""
    first, *rest = BYTES.encode("好").ids
    skipped = BYTES.get_vocab()["a"]
    detokenizer = Detokenizer(_decode(BYTES), frozenset([skipped]))
    assert [detokenizer.push(token) for token in (first, skipped, *rest)][-1] == "好"
