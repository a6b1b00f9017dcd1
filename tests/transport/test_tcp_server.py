"""The TCP server: frames by key, what it refuses, and that nothing a client does hurts it or keeps anything held."""

import random
import socket
import struct
from typing import Any

import numpy as np
import pytest

from kvpool.errors import AccessError, ConfigError, DeadlineError, KvpoolError, LimitError, UnavailableError
from kvpool.transport import Run
from kvpool.transport.tcp import Want, wire
from kvpool.transport.tcp.wire import Kind
from kvpool.units import MIB, SECOND
from tests.transport.tcp_rig import EMPTY, FRAME, LIFE, NODE, Rig, ended, eventually, key, served, soon


def want(number: int, length: int = FRAME, header: int = 64) -> tuple[Want, np.ndarray, np.ndarray]:
    head, payload = np.zeros(header, np.uint8), np.zeros(length - header, np.uint8)
    return (key(number), length, head, payload), head, payload


def works(rig: Rig) -> bool:
    """A well-behaved client gets frame 1, and then nothing is held."""
    asked, head, payload = want(1)
    reach = rig.open()
    assert reach.get([asked], soon()) == [True]
    assert (head == 2).all()
    assert (payload == 2).all()
    reach.close()
    eventually(lambda: not rig.index.held, "nothing is held")
    return True


def test_get_fills_what_is_there_and_says_what_is_not() -> None:
    """Absent ones, and such of another length, leave the others in their places."""
    with served() as rig:
        asked = [want(2), want(99), want(0, header=0), want(1, length=FRAME - 1), want(3, header=FRAME)]
        assert rig.open().get([one[0] for one in asked], soon()) == [True, False, True, False, True]
        assert [int(asked[number][1].sum() + asked[number][2].sum()) for number in (0, 2, 4)] == [3 * FRAME, FRAME, 4 * FRAME]
        eventually(lambda: not rig.index.held, "nothing is held")


def test_get_of_more_than_a_request_holds_gets_all() -> None:
    """Neither the number of keys nor that of pieces per call to the kernel shows."""
    with served(count=150) as rig:
        asked = [want(number % 150, header=33) for number in range(150)] + [want(1000 + number, 64) for number in range(9000)] + [want(7)]
        got = rig.open().get([one[0] for one in asked], soon())
        assert got == [True] * 150 + [False] * 9000 + [True]
        assert all((one[2] == number + 1).all() for number, one in enumerate(asked[:150]))
        assert (asked[-1][2] == 8).all()


def test_frames_are_checked_as_they_come_and_one_that_fails_is_none() -> None:
    """By their positions, each once its bytes are in place, and none that isn't there; in large and small ones, over several requests."""
    with served(count=150) as rig:
        numbers = [*range(150), *range(1000, 5000), 3, 2000, 4]
        asked = [want(number, FRAME if number < 150 else 64) for number in numbers]
        seen: list[int] = []

        def check(position: int) -> bool:
            seen.append(position)
            _, head, payload = asked[position]
            assert (head == numbers[position] + 1).all()
            assert (payload == numbers[position] + 1).all()
            return bool(numbers[position] != 3)

        got = rig.open().get([one[0] for one in asked], soon(), check)
        assert seen == [*range(150), 4150, 4152]
        assert [position for position, good in enumerate(got) if good] == [*range(3), *range(4, 150), 4152]


def test_check_that_raises_costs_its_call_only() -> None:
    """The rest of the answer is on the way still, so its connection is given up."""
    with served() as rig:
        reach = rig.open()
        with pytest.raises(ZeroDivisionError):
            reach.get([want(number)[0] for number in (0, 1, 2)], soon(), lambda position: bool(1 // 0))
        assert reach.get([want(1)[0]], soon()) == [True]


def test_probe_says_what_is_there() -> None:
    """For any number of keys, none included."""
    with served() as rig:
        reach = rig.open()
        assert reach.probe([], soon()) == b""
        assert reach.get([], soon()) == []
        assert reach.probe([key(number) for number in (0, 9, 3)], soon()) == b"\1\0\1"
        assert reach.probe([key(3)] * 5000 + [key(9)], soon()) == b"\1" * 5000 + b"\0"


def test_targets_that_do_not_fit_are_refused_before_any_byte_moves() -> None:
    """A frame must never run over its target."""
    with served() as rig:
        reach = rig.open()
        bad: Any
        for bad in (np.zeros(FRAME - 1, np.uint8), np.zeros(FRAME, np.int8), np.zeros(2 * FRAME, np.uint8)[::2]):
            with pytest.raises(ConfigError):
                reach.get([(key(0), FRAME, EMPTY, bad)], soon())
        frozen = np.zeros(FRAME, np.uint8)
        frozen.flags.writeable = False
        with pytest.raises(ConfigError):
            reach.get([(key(0), FRAME, EMPTY, frozen)], soon())


def test_frames_are_held_while_a_slow_client_takes_them_and_let_go_when_it_gives_up() -> None:
    """What is being sent must not be overwritten; what nobody takes must not be held for ever."""
    with served(arena_bytes=40 * MIB) as rig:
        rig.index.frames[key(5)] = (0, 32 * MIB)
        lazy = rig.dial()
        lazy.sendall(wire.pack_request(Kind.GET, 1, 20 * SECOND) + wire.pack_wants([key(5)], [32 * MIB]))
        eventually(lambda: rig.index.held == {(0, 32 * MIB): 1}, "the frame is held")
        lazy.close()
        eventually(lambda: not rig.index.held, "it is let go")
        slow = rig.dial()
        slow.sendall(wire.pack_request(Kind.GET, 1, SECOND // 5) + wire.pack_wants([key(5)], [32 * MIB]))
        eventually(lambda: bool(rig.index.held), "the frame is held")
        eventually(lambda: not rig.index.held and rig.server.connections == 0, "who doesn't read by its deadline is hung up on")
        slow.close()
        assert works(rig)


def test_write_that_is_late_ends_its_connection_and_writes_no_more() -> None:
    """After its deadline nothing of it may arrive: the node gives the bytes to others in the end."""
    with served() as rig:
        late = rig.dial()
        late.sendall(wire.pack_request(Kind.WRITE, 1, SECOND // 10) + wire.pack_runs([Run(8 * MIB, 1000, 0)]) + b"x" * 500)
        eventually(lambda: rig.server.connections == 0, "it is hung up on")
        late.close()
        assert not rig.arena[8 * MIB + 500 : 8 * MIB + 1000].any()


def test_write_of_a_client_that_has_gone_is_not_begun() -> None:
    """A server that stood still finds requests of long ago: their senders have reset their connections."""
    with served() as rig:
        gone = rig.dial()
        gone.sendall(wire.pack_request(Kind.WRITE, 1, SECOND)[:1])
        gone.sendall(wire.pack_request(Kind.WRITE, 1, SECOND)[1:] + wire.pack_runs([Run(8 * MIB, 4, 0)]))
        gone.shutdown(socket.SHUT_WR)
        eventually(lambda: rig.server.connections == 0, "it is hung up on")
        gone.close()
        assert not rig.arena[8 * MIB : 8 * MIB + 4].any()


def _hostile() -> list[bytes]:
    """Requests that break the rules, 30 and more."""
    rng = random.Random(5)
    good = wire.pack_request(Kind.READ, 1, SECOND)
    runs = struct.pack("<2Q", 0, 64)
    bad = [struct.pack("<B3sIQ", kind, b"\0\0\0", 1, 1000) + runs * 2 for kind in (0, 5, 6, 127, 255)]
    bad += [struct.pack("<B3sIQ", kind, b"\0\0\0", count, 1000) for kind in (1, 2, 3, 4) for count in (0, 4097, 1 << 31, (1 << 32) - 1)]
    bad += [struct.pack("<B3sIQ", 3, zeros, 1, 1000) + runs for zeros in (b"\1\0\0", b"\0\0\1", b"\xff\xff\xff")]
    bad += [struct.pack("<B3sIQ", kind, b"\0\0\0", 1, 0) + runs for kind in (3, 4)]
    far = [(16 * MIB, 1), (16 * MIB + 1, 0), (0, 16 * MIB + 1), ((1 << 64) - 1, 2), (2, (1 << 64) - 1), (1 << 63, 1 << 63)]
    bad += [struct.pack("<B3sIQ", kind, b"\0\0\0", 1, 10**6) + struct.pack("<2Q", *run) for kind in (3, 4) for run in far]
    bad += [good + runs + rng.randbytes(40) for _ in range(4)]
    return bad


@pytest.mark.parametrize("request_bytes", _hostile())
def test_malformed_request_ends_its_connection_and_nothing_else(request_bytes: bytes) -> None:
    """Its own, with a word why; the server goes on and the arena is as it was."""
    with served() as rig:
        before = rig.arena.copy()
        bystander = rig.open()
        said = ended_after(rig, request_bytes)
        assert said[0] in (0, wire.Status.BROKEN)
        assert b"KVPB" not in said
        assert bystander.probe([key(0)], soon()) == b"\1"
        assert np.array_equal(rig.arena, before)
        assert works(rig)


def ended_after(rig: Rig, request_bytes: bytes) -> bytes:
    naughty = rig.dial()
    naughty.sendall(request_bytes)
    return ended(naughty)


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\nAccept: */*\r\n\r\n", b"\0" * 32, b"\xff" * 32, b"\x16\x03\x01\x02\x00\x01\x00" + b"\1" * 100,
        struct.pack("<4sHHQ16s", b"KVPT", 9, 0, LIFE, bytes.fromhex(NODE)), struct.pack("<4sHHQ16s", b"KVPT", 1, 65535, LIFE, bytes(16)),
    ],
)  # fmt: skip
def test_stranger_that_speaks_something_else_is_hung_up_on(hello: bytes) -> None:
    """Port scanners and browsers."""
    with served() as rig:
        assert ended(rig.dial(hello))[:1] == bytes([wire.Status.BROKEN])
        assert works(rig)


def test_requests_cut_anywhere_hurt_nobody() -> None:
    """A client may die at any byte."""
    with served() as rig:
        whole = wire.pack_request(Kind.GET, 2, SECOND) + wire.pack_wants([key(0), key(1)], [FRAME, FRAME])
        for cut in range(0, len(whole), 7):
            cutter = rig.dial()
            cutter.sendall(whole[:cut])
            cutter.close()
        assert works(rig)
        eventually(lambda: rig.server.connections == 0, "all are gone")


@pytest.mark.parametrize(("node_id", "life"), [("aa" * 16, LIFE), (NODE, LIFE + 1)])
def test_another_node_or_life_is_not_served(node_id: str, life: int) -> None:
    """After a restart somebody else may listen at the same port."""
    with served() as rig, pytest.raises(UnavailableError, match="not the one"):
        rig.open(node_id=node_id, incarnation=life)


def test_connections_above_the_limit_are_told_so() -> None:
    """And room that comes free is given again."""
    with served(max_connections=3) as rig:
        first = [rig.open() for _ in range(3)]
        with pytest.raises(LimitError, match="3 connections already"):
            rig.open()
        assert all(reach.probe([key(0)], soon()) == b"\1" for reach in first)
        first[0].close()
        eventually(lambda: rig.server.connections == 2, "one has gone")
        assert works(rig)


def test_second_thread_gets_a_connection_of_its_own_and_a_third_waits() -> None:
    """A small read is not behind a large one; the number of connections is bounded."""
    with served() as rig:
        reach = rig.open()
        with reach._lines.line(soon()), reach._lines.line(soon()):
            assert rig.server.connections == 2
            with pytest.raises(DeadlineError, match="other transfers"):
                reach.probe([key(0)], soon(0.05))
        assert reach.probe([key(0)], soon()) == b"\1"
        assert rig.server.connections == 2


def test_missed_deadline_costs_its_call_and_the_next_one_dials_anew() -> None:
    """Others of the same reach don't pay for it."""
    with served() as rig:
        reach = rig.open()
        rig.index.stall()
        with pytest.raises(DeadlineError):
            reach.probe([key(0)], soon(0.1))
        rig.index.go_on()
        assert reach.probe([key(0)], soon()) == b"\1"


def test_token_is_asked_for_and_asked_again() -> None:
    """A token that is revoked counts no more a second later, on connections that are open, too."""
    known = {"good"}

    def admit(token: str) -> None:
        if token not in known:
            raise AccessError(f"{len(token)} letters nobody knows")

    with served(admit=admit) as rig:
        for wrong in ("", "bad"):
            with pytest.raises(AccessError, match="nobody knows"):
                rig.open(token=wrong)
        reach = rig.open(token="good")
        assert reach.probe([key(0)], soon()) == b"\1"
        known.clear()
        eventually(lambda: refused(lambda: reach.probe([key(0)], soon())), "the token counts no more")


def refused(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except AccessError:
        return True
    return False


def test_closed_server_ends_everybody_and_its_port_is_free() -> None:
    """A child that is told to end does."""
    with served() as rig:
        reach = rig.open()
        rig.server.close()
        rig.server.close()
        with pytest.raises(KvpoolError):
            reach.probe([key(0)], soon())
        with pytest.raises(UnavailableError):
            rig.open()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:70000", ":1", "127.0.0.1:x"])
def test_address_that_is_none_is_refused(address: str) -> None:
    """By either end, in words."""
    with served() as rig, pytest.raises(ConfigError, match="host:port"):
        rig.open(address=address)
