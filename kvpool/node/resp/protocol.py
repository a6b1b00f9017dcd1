"""RESP, the protocol of Redis, as bytes: commands out of a stream that comes in any pieces, and answers into one. No I/O.

A command is an array of bulk strings, or a line of words (*inline*), as people type it. Lengths are compared with the limits before
anything is kept, so what a parser holds is what it was fed and one command within its limits.
"""

import re
from typing import Final, NamedTuple

from kvpool.errors import ProtocolError

CRLF: Final = b"\r\n"
_NUMBER = re.compile(rb"-?[0-9]{1,10}\Z")
_CONTROL = re.compile(r"[\x00-\x1f]+")


class Limits(NamedTuple):
    """Of one command: words, bytes of a word, bytes of all words together, bytes of a line (an inline command, or a number)."""

    words: int
    word_bytes: int
    all_bytes: int
    line_bytes: int = 4096


class Parser:
    """`feed` what came, then call `next` until it gives None. After a `ProtocolError` the stream can't be followed any more."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """May be changed between two commands."""
        self._buffer = bytearray()
        self._words: list[bytes] = []
        self._left = 0
        self._length = -1
        self._taken = 0

    @property
    def announced(self) -> int:
        """Bytes of the words of the command that is under way, as far as it has said."""
        return self._taken

    @property
    def held(self) -> int:
        """Bytes kept: what was fed and isn't a word yet, and the words so far."""
        return len(self._buffer) + sum(map(len, self._words))

    @property
    def resting(self) -> bool:
        """Whether nothing has come of a further command."""
        return not self._buffer and not self._left

    def feed(self, data: bytes) -> None:
        """More of the stream."""
        self._buffer += data

    def next(self) -> list[bytes] | None:
        """The next command's words, at least one; None: it isn't complete. Raises `ProtocolError`."""
        while True:
            if not self._left:
                line = self._line()
                if line is None:
                    return None
                if not line.startswith(b"*"):
                    if words := self._inline(line):
                        return words
                    continue
                self._left = max(0, _number(line, b"*", self.limits.words, "multibulk length"))
                self._words, self._taken = [], 0
            elif not self._word():
                return None
            elif not self._left:
                words, self._words, self._taken = self._words, [], 0
                return words

    def _word(self) -> bool:
        """Take the next word of the command under way; False: it isn't complete."""
        if self._length < 0:
            line = self._line()
            if line is None:
                return False
            if not line.startswith(b"$"):
                raise ProtocolError(f"expected '$', got {_shown(line)}")
            length = _number(line, b"$", self.limits.word_bytes, "bulk length")
            if length < 0 or self._taken + length > self.limits.all_bytes:
                raise ProtocolError("invalid bulk length, or words that are too long together")
            self._length = length
            self._taken += length
        end = self._length
        if len(self._buffer) < end + len(CRLF):
            return False
        if self._buffer[end : end + len(CRLF)] != CRLF:
            raise ProtocolError("a bulk string doesn't end where it said")
        with memoryview(self._buffer) as view:
            self._words.append(bytes(view[:end]))
        del self._buffer[: end + len(CRLF)]
        self._length = -1
        self._left -= 1
        return True

    def _line(self) -> bytes | None:
        """The next line without its end; None: it isn't complete."""
        at = self._buffer.find(b"\n", 0, self.limits.line_bytes)
        if at < 0:
            if len(self._buffer) >= self.limits.line_bytes:
                raise ProtocolError(f"a line has at most {self.limits.line_bytes} bytes")
            return None
        line = bytes(self._buffer[:at])
        del self._buffer[: at + 1]
        return line.removesuffix(b"\r")

    def _inline(self, line: bytes) -> list[bytes]:
        if b'"' in line or b"'" in line:
            raise ProtocolError("quotes are not understood in inline commands; send an array of bulk strings")
        words = line.split()
        if len(words) > self.limits.words:
            raise ProtocolError(f"a command has at most {self.limits.words} words")
        return words


def _number(line: bytes, sign: bytes, most: int, what: str) -> int:
    digits = line.removeprefix(sign)
    if not _NUMBER.match(digits) or int(digits) > most:
        raise ProtocolError(f"invalid {what} {_shown(digits)}; at most {most} here")
    return int(digits)


def _shown(raw: bytes) -> str:
    return ascii(raw[:16].decode("latin-1"))


# Answers

OK: Final = b"+OK\r\n"
EMPTY: Final = b"*0\r\n"


def error(text: str, code: str = "ERR") -> bytes:
    """A refusal: a code in capitals, then what to do about it, in one line."""
    return f"-{code} {_CONTROL.sub(' ', text)}\r\n".encode("utf-8", "replace")


def number(value: int) -> bytes:
    """An integer."""
    return b":%d\r\n" % value


def bulk(value: bytes) -> bytes:
    """A string of any bytes."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def nil(version: int) -> bytes:
    """Nothing there, as RESP2 or RESP3 says it."""
    return b"_\r\n" if version == 3 else b"$-1\r\n"


def array(items: list[bytes]) -> bytes:
    """Answers in an array."""
    return b"*%d\r\n%b" % (len(items), b"".join(items))


def mapping(items: dict[str, bytes], version: int) -> bytes:
    """Names and answers: a map in RESP3, an array of both in turn in RESP2."""
    pairs = b"".join(bulk(name.encode()) + value for name, value in items.items())
    return b"%b%d\r\n%b" % (b"%" if version == 3 else b"*", len(items) if version == 3 else 2 * len(items), pairs)
