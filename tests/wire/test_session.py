"""Sessions: the two ends over a real socket, and how they part."""

import asyncio
import os
import socket
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ClosedError, ConfigError, DeadlineError, ProtocolError, UnavailableError
from kvpool.request.pool import Outcome, Slab
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session import MAX_BLOCKS, Answer, Kind
from kvpool.wire.session_client import Session
from kvpool.wire.session_server import SessionServer
from tests.wire.session_rig import NODE, FakeHost, Rig, block


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


async def test_every_call_arrives_as_it_was_said_and_so_does_its_answer(rig: Rig) -> None:
    """Both ends speak the same format, field by field."""
    session = await rig.session(owner="käfer")
    blocks = [block(i) for i in range(1, 4)]

    def calls() -> None:
        assert session.slab(4096) == Slab(5, 640, 4096)
        outcomes, following = session.put(5, blocks, sequence=99, tenant="acme", next_slab=8192)
        assert outcomes == [Outcome.GRANTED, Outcome.EXISTS, Outcome.NO_SPACE]
        assert following == Slab(6, 1280, 8192)
        assert session.put(5, blocks)[1] is None
        lease_id, grants, waiting = session.reserve(blocks, sequence=3, tenant="t", near=True)
        assert (lease_id, waiting) == (7, True)
        assert grants == [(Outcome.GRANTED, 0), (Outcome.GRANTED, 64), (Outcome.GRANTED, 128)]
        assert session.commit(7, [one.key for one in blocks]) == [False, True, False]
        session.release(7, suspect=[blocks[0].key])

    await asyncio.to_thread(calls)
    made = rig.host.calls[0]
    assert (made.owner, rig.host.cells) == ("käfer", [b"the cell"])
    assert [request.kind for request in made.asked] == [Kind.SLAB, Kind.PUT, Kind.PUT, Kind.RESERVE, Kind.COMMIT, Kind.RELEASE]
    put, reserve, release = made.asked[1], made.asked[3], made.asked[5]
    assert (put.lease_id, put.sequence, put.tenant, put.nbytes, list(put.blocks)) == (5, 99, "acme", 8192, blocks)
    assert (reserve.sequence, reserve.tenant, reserve.near, list(reserve.blocks)) == (3, "t", True, blocks)
    assert (release.lease_id, release.keys) == (7, [blocks[0].key])
    session.close()


async def test_block_without_a_parent_and_the_longest_message(rig: Rig) -> None:
    """The first of a chain has no parent; 1024 blocks fit one packet, one more is the caller's mistake."""
    session = await rig.session()
    first = block(1)._replace(parent=b"")
    many = [first] * MAX_BLOCKS
    _, grants, _ = await asyncio.to_thread(session.reserve, many)
    assert len(grants) == MAX_BLOCKS
    assert rig.host.calls[0].asked[0].blocks[7] == first
    with pytest.raises(ConfigError, match="1024"):
        session.reserve([*many, first])
    with pytest.raises(ConfigError, match="32 bytes"):
        session.commit(1, [b"short"])
    with pytest.raises(ConfigError, match="can't say"):
        session.slab(-1)
    assert session.alive
    session.close()


async def test_board_is_passed_and_closed_with_the_session(rig: Rig) -> None:
    """The client gets the node's own file, and owns the descriptor it got."""
    session = await rig.session()
    board_fd = session.board_fd
    assert os.pread(board_fd, 100, 0) == b"the board"
    assert not os.get_inheritable(board_fd)
    session.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(board_fd)


async def test_refusal_is_the_callers_error_and_the_session_goes_on(rig: Rig) -> None:
    """A node refuses a call that makes no sense in words, and nothing else suffers."""
    session = await rig.session()
    with pytest.raises(ConfigError, match="priority 0 to 100"):
        await asyncio.to_thread(session.reserve, [block(1)._replace(priority=200)])
    assert await asyncio.to_thread(session.slab, 64) == Slab(5, 640, 64)
    session.close()


async def test_another_node_or_another_life_of_it_is_refused_in_words(rig: Rig) -> None:
    """The node refuses what was meant for somebody else."""
    for other in (NodeIdentity("f" * 32, NODE.incarnation), NodeIdentity(NODE.node_id, 5)):
        with pytest.raises(UnavailableError, match="meant for"):
            await rig.session(other)
    assert rig.host.calls == []


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"version": 3}, ProtocolError, "version 3 of sessions is spoken there, 2 here: run the same version"),
        ({"incarnation": 5}, UnavailableError, "is of node"),
        ({"board": False}, ProtocolError, "no board"),
        ({"magic": b"HTTP/1.1"}, ProtocolError, "not a greeting"),
    ],
)
async def test_client_checks_who_answers(tmp_path: Path, change: dict[str, Any], error: type[Exception], says: str) -> None:
    """Whoever listens there now, the client goes on only with the node it meant, in a language both speak."""
    path = tmp_path / "other.sock"
    said = {"magic": b"KVPSESS\0", "version": 2, "incarnation": NODE.incarnation, "board": True, **change}
    node_id = bytes.fromhex(NODE.node_id)
    answer = struct.pack("<8sHHI16sQ", said["magic"], said["version"], 0, 0, node_id, said["incarnation"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, tempfile.TemporaryFile() as board:
        listener.bind(str(path))
        listener.listen()
        opening = asyncio.create_task(asyncio.to_thread(Session.open, str(path), NODE, "t", board.fileno(), 5.0))
        peer, _ = await asyncio.to_thread(listener.accept)
        socket.send_fds(peer, [answer], [board.fileno()] if said["board"] else [])
        with pytest.raises(error, match=says):
            await opening
        peer.close()


async def test_socket_is_for_this_user_only(rig: Rig) -> None:
    """The file's mode keeps others out, before any check of ours."""
    mode = rig.path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_peer_of_another_user_is_turned_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the mode not keep somebody out, the kernel's word on who it is does."""
    monkeypatch.setattr("kvpool.wire.session_server.os.geteuid", lambda: 12345)
    monkeypatch.setattr("kvpool.wire.session_server._CREDENTIALS", _Foreign())
    with pytest.raises(UnavailableError):
        await rig.session()
    assert rig.host.calls == []


class _Foreign:
    size = 12

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        return 1, 54321, 1


async def test_client_that_closes_is_gone_and_one_that_the_server_ends_is_not(rig: Rig) -> None:
    """The host must know whether the client may still be at work in the arena."""
    closing, ended = await rig.session(), await rig.session()
    closing.close()
    closing.close()
    await rig.until(lambda: rig.host.calls[0].ended)
    assert rig.host.calls[0].ended == [True]
    rig.server.close()
    rig.server.close()
    assert rig.host.calls[1].ended == [False]
    assert not ended.alive
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        ended.slab(64, timeout_s=5.0)
    assert time.monotonic() - began < 4
    assert not rig.path.exists()
    ended.close()
    with pytest.raises(ClosedError):
        ended.slab(64)


async def test_no_node_is_unavailable_at_once(tmp_path: Path) -> None:
    """No file, a dead one's socket, a directory that isn't there: all the same to a client, who goes another way."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    (tmp_path / "file").touch()
    for path in ("dead.sock", "file", "none.sock", "no/none.sock"):
        with pytest.raises(UnavailableError):
            Session.open(str(tmp_path / path), NODE, "t", 0, 5.0)


async def test_call_without_answer_ends_in_time_and_breaks_the_session(rig: Rig) -> None:
    """The late answer must not be taken for the next call's; the socket stays, for other threads may be writing to what it was granted."""
    session = await rig.session()
    with pytest.raises(DeadlineError):
        session.slab(64, timeout_s=0.05)  # the loop of the server is this thread's, so nobody answers
    await rig.until(lambda: rig.host.calls[0].asked)
    assert not session.alive
    with pytest.raises(UnavailableError, match="broken"):
        session.slab(64)
    await asyncio.sleep(0.02)
    assert rig.host.calls[0].ended == []
    session.close()
    await rig.until(lambda: rig.host.calls[0].ended == [True])


async def test_node_that_never_answers_the_greeting_is_a_deadline(rig: Rig) -> None:
    """A frozen node costs its clients the time they gave, no more."""
    with pytest.raises(DeadlineError):
        Session.open(str(rig.path), NODE, "t", rig.cell_fd, 0.05)
    await rig.until(lambda: rig.host.calls and rig.host.calls[0].ended)


async def test_answers_that_cannot_be_break_the_session(rig: Rig) -> None:
    """A client believes its node no more than the node its client."""
    wrong = [
        Answer(outcomes=b"\0\0"),
        Answer(outcomes=b""),
        Answer(outcomes=b"\x07"),
    ]
    for answer in wrong:
        session = await rig.session()
        rig.host.calls[-1].answers = lambda _, answer=answer: answer
        with pytest.raises(ProtocolError):
            await asyncio.to_thread(session.put, 1, [block(1)])
        assert not session.alive
        session.close()


async def test_threads_share_a_session_and_never_mix_their_answers(rig: Rig) -> None:
    """One message at a time; each caller gets the answer to its own."""
    session = await rig.session()
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(200):
            got = session.slab(64 * number)
            if got != Slab(5, 640, 64 * number):
                wrong.append(got)

    def all_of_them() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    await asyncio.to_thread(all_of_them)
    assert wrong == []
    assert len(rig.host.calls[0].asked) == 800
    session.close()


async def test_closing_wakes_who_waits(rig: Rig) -> None:
    """`close` from another thread doesn't leave a caller waiting for its whole deadline."""
    session = await rig.session()
    made = rig.host.calls[0]
    loop_blocked, go_on = threading.Event(), threading.Event()

    def hang(_: object) -> Answer:
        loop_blocked.set()
        go_on.wait(10)
        return Answer()

    made.answers = hang
    raised: list[type[BaseException]] = []

    def call() -> None:
        try:
            session.slab(64, timeout_s=60)
        except Exception as error:
            raised.append(type(error))

    caller = threading.Thread(target=call)

    def close() -> None:
        loop_blocked.wait(10)
        session.close()
        caller.join(10)
        go_on.set()

    closer = threading.Thread(target=close)
    caller.start()
    closer.start()
    await rig.until(lambda: not closer.is_alive())
    assert raised == [UnavailableError]


async def test_forked_child_may_not_use_its_parents_session(rig: Rig) -> None:
    """It would take its parent's answers; and closing there leaves the parent's session as it is."""
    session = await rig.session()
    # A bare fork of a process with threads is what this is about; the child only makes calls that don't wait for other threads.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            session.slab(64)
        except ClosedError:
            session.close()
            os._exit(0 if not session.alive else 2)
        finally:
            os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert session.alive
    assert await asyncio.to_thread(session.slab, 64) == Slab(5, 640, 64)
    session.close()


async def test_session_ends_with_its_process_though_a_forked_child_lives_on(rig: Rig) -> None:
    """A pool of workers that was forked off mustn't keep what a dead process held."""
    session = await rig.session()
    end, keep = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.read(end, 1)
        os._exit(0)
    session._sock.close()  # as the kernel does at the end of a process
    try:
        await rig.until(lambda: rig.host.calls[0].ended)
        assert rig.host.calls[0].ended == [True]
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # noqa: ASYNC222 - it doesn't wait
    finally:
        os.write(keep, b".")
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(end)
        os.close(keep)
        session.close()


async def test_path_longer_than_an_address_works(tmp_path: Path) -> None:
    """Socket addresses have room for 107 bytes; directories may be deeper."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    rig = Rig(deep)
    session = await rig.session()
    assert session.alive
    assert [path.name for path in deep.iterdir()] == ["node.sock"]
    session.close()
    rig.close()


async def test_socket_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    """The operator learns which file it is about."""
    with pytest.raises(ConfigError, match=r"missing/s\.sock"):
        SessionServer(tmp_path / "missing" / "s.sock", FakeHost()).start()


async def test_client_that_says_nothing_is_let_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a greeting is nobody's, and doesn't stay."""
    monkeypatch.setattr("kvpool.wire.session_server.GREETING_S", 0.01)
    silent = await rig.raw()
    assert await asyncio.to_thread(silent.recv, 10) == b""
    silent.close()
    await rig.until(lambda: len(rig.server) == 0)


async def test_only_so_many_sessions_are_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the next one is refused in words, and gets in when another one has ended."""
    monkeypatch.setattr("kvpool.wire.session_server.MAX_SESSIONS", 2)
    open_ones = [await rig.session(), await rig.session()]
    with pytest.raises(UnavailableError, match="2 sessions are open"):
        await rig.session()
    open_ones.pop().close()
    await rig.until(lambda: len(rig.server) == 1)
    open_ones.append(await rig.session())
    for session in open_ones:
        session.close()


async def test_no_descriptors_left_is_tried_again_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node at its limit of descriptors neither dies nor spins, and takes clients in once there is room."""
    monkeypatch.setattr("kvpool.wire.session_server._PAUSE_S", 0.02)
    listener, tries = rig.server._listener, []

    class Full:
        def accept(self) -> tuple[socket.socket, object]:
            tries.append(1)
            if len(tries) < 4:
                raise OSError(24, "Too many open files")
            assert listener is not None
            return listener.accept()

        def fileno(self) -> int:
            assert listener is not None
            return listener.fileno()

        def close(self) -> None:
            assert listener is not None
            listener.close()

    rig.server._listener = Full()  # type: ignore[assignment]
    session = await rig.session()
    assert 4 <= len(tries) <= 6
    session.close()
