"""What a single token is by itself, with the decoders that vocabularies use."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from router.testing.model import END, tiny_model
from router.text.spelling import Spelling


@pytest.mark.parametrize("text", ["the lazy dog", "naïve 你好 🎉", " \n\t!~¡ÿ\x00\x7f\u00ad"])
def test_bytes_of_tokens_add_up_to_the_text(tmp_path: Path, text: str) -> None:
    """Even where a character is spread over several tokens, whose own texts are broken."""
    model = tiny_model(tmp_path)
    spelled = [model.spell(token) for token in model.encode(text, rendered=False)]
    assert b"".join(raw for _, raw in spelled).decode() == text
    assert all(piece == raw.decode(errors="replace") for piece, raw in spelled)


def test_special_tokens_are_spelled_as_themselves(tmp_path: Path) -> None:
    """They may be alternatives to a token of the text."""
    model = tiny_model(tmp_path)
    assert model.spell(model.stop_tokens[0]) == (END, END.encode())
    assert model.spell(10**6) == ("", b"")


def test_byte_fallback_names_bytes() -> None:
    """As Llama 2 has it: `<0xE4>` is one byte, the lower block is a space."""
    tokenizer = Tokenizer(models.BPE(vocab={"<0xE4>": 0, "\u2581hi": 1, "é": 2}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    spelling = Spelling(tokenizer)
    assert [spelling.of(token) for token in range(4)] == [("\ufffd", b"\xe4"), (" hi", b" hi"), ("é", "é".encode()), ("<s>", b"<s>")]
