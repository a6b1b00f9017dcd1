"""What a single token is by itself: its text and its bytes, as log-probabilities name tokens.

A token need not be whole characters, so its bytes say more than its text. How a vocabulary spells bytes depends on the decoder:
byte-level ones (GPT-2, Llama 3, Qwen, SmolLM) map each byte to a printable character, those with byte fallback (Llama 2) name a byte
`<0xE4>`. Of any other token the bytes are its text's.
"""

import json
import re

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


class Spelling:
    """The tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in [decoder, *decoder.get("decoders", ())]}
        self._bytes = _byte_level() if "ByteLevel" in kinds else {}
        self._added = tokenizer.get_added_tokens_decoder()

    def of(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of `token`; both empty for an id that the tokenizer doesn't have."""
        if token in self._added:
            text = str(self._added[token].content)
            return text, text.encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return "", b""
        if self._bytes and all(letter in self._bytes for letter in name):
            raw = bytes(self._bytes[letter] for letter in name)
            return raw.decode(errors="replace"), raw
        if found := _BYTE.match(name):
            raw = bytes.fromhex(found[1])
            return raw.decode(errors="replace"), raw
        text = name.replace("\u2581", " ")
        return text, text.encode()


def _byte_level() -> dict[str, int]:
    """Letter -> byte, as byte-level vocabularies spell them: printable Latin-1 as itself, the rest in order from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}
