"""RESP as bytes: whatever comes, in whatever pieces, gives the same commands or a protocol error, within the limits."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.node.resp.protocol import Limits, Parser, bulk, error, mapping, nil, number

LIMITS = Limits(words=16, word_bytes=300, all_bytes=1000, line_bytes=64)
WORD = st.binary(max_size=80)
COMMAND = st.lists(WORD, min_size=1, max_size=8)
INLINE = st.lists(st.text("abcXYZ0189:@", min_size=1, max_size=6), min_size=1, max_size=5)


def spelled(words: Iterable[bytes]) -> bytes:
    """A command as clients send it."""
    words = list(words)
    return b"*%d\r\n%b" % (len(words), b"".join(map(bulk, words)))


MIXED = st.one_of(
    COMMAND.map(lambda words: (words, spelled(words))),
    INLINE.map(lambda words: ([word.encode() for word in words], " ".join(words).encode() + b"\r\n")),
    st.sampled_from([b"\r\n", b"*0\r\n", b"*-1\r\n", b"  \n"]).map(lambda raw: (None, raw)),
)
PIECES = st.lists(
    st.sampled_from([b"*", b"$", b"\r\n", b"\n", b"-1", b"3", b"16", b"17", b"301", b"99999999999", b"GET", b"\0", b"'"])
).map(b"".join)


def damaged(commands: list[list[bytes]], at: int, patch: bytes) -> bytes:
    """Good commands with one byte replaced."""
    stream = b"".join(map(spelled, commands))
    return stream[:at] + patch + stream[at + 1 :]


DAMAGED = st.builds(damaged, st.lists(COMMAND, min_size=1, max_size=3), st.integers(0, 400), st.binary(max_size=3))


def parsed(stream: bytes, cuts: Iterable[int] = ()) -> tuple[list[list[bytes]], str]:
    """The commands in `stream`, given in pieces, and what is wrong behind them. Looks at the bound on memory all the way."""
    parser, found, at = Parser(LIMITS), [], 0
    try:
        for cut in [*sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]:
            parser.feed(stream[at:cut])
            at = cut
            while (words := parser.next()) is not None:
                assert words
                assert len(words) <= LIMITS.words
                found.append(words)
            assert parser.held <= LIMITS.all_bytes + LIMITS.word_bytes + LIMITS.line_bytes
            assert parser.announced <= LIMITS.all_bytes
    except ProtocolError as failure:
        return found, str(failure)
    return found, "" if parser.resting else "more to come"


@given(st.lists(MIXED), st.lists(st.integers(0, 3000)))
def test_commands_are_the_same_however_the_stream_is_cut(commands: list[tuple[list[bytes] | None, bytes]], cuts: list[int]) -> None:
    """The network cuts where it likes; inline commands, empty ones and arrays may be mixed."""
    wanted = [words for words, _ in commands if words is not None]
    assert parsed(b"".join(raw for _, raw in commands), cuts) == (wanted, "")


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=600), PIECES, DAMAGED), st.lists(st.integers(0, 600)))
def test_garbage_is_a_protocol_error_at_worst_and_the_same_in_any_pieces(stream: bytes, cuts: list[int]) -> None:
    """Nothing that a stranger sends raises anything else, or makes the parser keep more than its limits."""
    assert parsed(stream, cuts) == parsed(stream, range(len(stream)))


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"*17\r\n", "multibulk length"),
        (b"*1x\r\n", "multibulk length"),
        (b"*1\r\n:3\r\n", "expected '\\$'"),
        (b"*1\r\n$301\r\n", "bulk length"),
        (b"*1\r\n$-1\r\n", "bulk length"),
        (b"*4\r\n" + 3 * bulk(bytes(300)) + b"$300\r\n", "long together"),
        (b"*1\r\n$3\r\nabcde", "doesn't end"),
        (b"x" * 64, "a line has at most"),
        (b'SET a "b c"\r\n', "quotes"),
        (b"a " * 20 + b"\r\n", "at most 16 words"),
    ],
)
def test_what_breaks_a_limit_or_the_protocol_is_named(stream: bytes, why: str) -> None:
    """By its length line, before its bytes are taken in."""
    parser = Parser(LIMITS)
    parser.feed(stream)
    with pytest.raises(ProtocolError, match=why):
        parser.next()


def test_announced_bytes_are_known_before_they_come() -> None:
    """So that room for a large value can be asked for first."""
    parser = Parser(LIMITS)
    parser.feed(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$250\r\n")
    assert parser.next() is None
    assert parser.announced == 254
    assert not parser.resting
    parser.feed(bytes(250) + b"\r\n")
    assert parser.next() == [b"SET", b"k", bytes(250)]
    assert parser.announced == 0
    assert parser.resting


def test_answers_as_both_versions_spell_them() -> None:
    """What clients of RESP2 and RESP3 expect to the byte; an error stays one line whatever it quotes."""
    assert nil(2) + nil(3) == b"$-1\r\n_\r\n"
    assert mapping({"a": number(1)}, 2) == b"*2\r\n$1\r\na\r\n:1\r\n"
    assert mapping({"a": number(1)}, 3) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert error("no\r\n+OK", "NOAUTH") == b"-NOAUTH no +OK\r\n"
