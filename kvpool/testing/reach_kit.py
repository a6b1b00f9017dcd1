"""The contract of a reach, as tests: subclass `ReachKit` and provide a fixture `far`.

`far` is a node whose arena the kit may write on directly (a window of it, mapped), and which it can freeze and kill. Where the reach
crosses a process, the owner is another process, so that freezing and killing are the real thing: SIGSTOP and SIGKILL.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pytest

from kvpool.errors import ClosedError, ConfigError, DeadlineError, KvpoolError, UnavailableError
from kvpool.transport import Reach, Run
from kvpool.transport.reach import Bytes
from kvpool.units import KIB, MIB, MS, SECOND

WINDOW_BYTES = 48 * MIB
PATIENCE_NS = 30 * SECOND
_GONE = (UnavailableError, DeadlineError)


class FarSide(Protocol):
    """A node under test. The kit uses `window`, `WINDOW_BYTES` of its arena that start at `offset`, all covered by the lease `lease_id`."""

    window: Bytes
    offset: int
    arena_bytes: int
    lease_id: int
    outlives_owner: bool  # reads go on, and are right, after the owner has died

    @property
    def serves_frozen(self) -> bool:
        """Whether transfers of the reaches opened so far go on while the owner is frozen: the network card serves them."""
        ...

    def open(self) -> Reach:
        """A new reach to it, as another client would have. The fixture closes it at the end."""
        ...

    def freeze(self) -> None:
        """The owner stops running, as on a host that hangs."""
        ...

    def thaw(self) -> None:
        """The owner runs again."""
        ...

    def kill(self) -> None:
        """The owner dies as by `kill -9`; frozen or not."""
        ...


class Client:
    """A reach with the window's offset and lease filled in."""

    def __init__(self, far: FarSide) -> None:
        self.far = far
        self.reach = far.open()

    def read(self, runs: Sequence[Run], into: Bytes, deadline_ns: int | None = None) -> None:
        """Read runs whose offsets are relative to the window."""
        self.reach.read(self._absolute(runs), into, lease_id=self.far.lease_id, deadline_ns=deadline_ns or soon())

    def write(self, runs: Sequence[Run], source: Bytes, deadline_ns: int | None = None) -> None:
        """Write runs whose offsets are relative to the window."""
        self.reach.write(self._absolute(runs), source, lease_id=self.far.lease_id, deadline_ns=deadline_ns or soon())

    def _absolute(self, runs: Sequence[Run]) -> list[Run]:
        return [Run(self.far.offset + run.offset, run.length, run.at) for run in runs]


def soon(within_ns: int = PATIENCE_NS) -> int:
    """A deadline far enough away for a slow machine."""
    return time.monotonic_ns() + within_ns


def noise(length: int, seed: int) -> Bytes:
    """Reproducible bytes without any pattern."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


SCATTERED = (
    Run(0, 1, 7), Run(1, 63, 100), Run(4095, 2, 300), Run(8191, 65537, 1001), Run(MIB - 1, 3, 70_001),
    Run(2 * MIB, MIB, 100_000), Run(5 * MIB + 17, 0, 5), Run(4 * MIB + 1, 333_333, 2 * MIB + 13),
)  # fmt: skip
SCATTERED_BYTES = 3 * MIB


def in_thread(call: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Run `call` on the side; its exception, if any, lands in the list."""
    caught: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except KvpoolError as error:
            caught.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, caught


class ReachKit:
    """Tests every reach must pass."""

    def test_read_of_scattered_runs_brings_exactly_those_bytes(self, far: FarSide) -> None:
        """Any offset, length and place; bytes of the buffer between the runs stay as they were."""
        client, far.window[:] = Client(far), noise(WINDOW_BYTES, 1)
        into = np.full(SCATTERED_BYTES, 0xA5, np.uint8)
        expected = into.copy()
        for offset, length, at in SCATTERED:
            expected[at : at + length] = far.window[offset : offset + length]
        client.read(SCATTERED, into)
        assert np.array_equal(into, expected)

    def test_write_of_scattered_runs_changes_exactly_those_bytes(self, far: FarSide) -> None:
        """On return the owner sees the bytes, and no other byte of its arena has changed."""
        client, far.window[:] = Client(far), 0x5A
        source = noise(SCATTERED_BYTES, 2)
        expected = far.window.copy()
        for offset, length, at in SCATTERED:
            expected[offset : offset + length] = source[at : at + length]
        client.write(SCATTERED, source)
        assert np.array_equal(far.window, expected)

    @pytest.mark.parametrize("length", [1, 64 * KIB, 16 * MIB + 1])
    def test_write_then_read_at_odd_places_returns_what_was_written(self, far: FarSide, length: int) -> None:
        """Read your write, for one run of any size, by the same and by another client."""
        client, other = Client(far), Client(far)
        source, into = noise(length + 11, length), np.zeros(length + 5, np.uint8)
        client.write([Run(MIB + 1, length, 11)], source)
        for reader in (client, other):
            into[:] = 0
            reader.read([Run(MIB + 1, length, 5)], into)
            assert np.array_equal(into[5:], source[11:])

    def test_many_small_runs_all_arrive(self, far: FarSide) -> None:
        """More runs than any window of requests on the way holds."""
        client, far.window[:] = Client(far), noise(WINDOW_BYTES, 3)
        runs = [Run(9973 * i, 257, 300 * i) for i in range(1000)]
        into = np.zeros(300 * 1000, np.uint8)
        client.read(runs, into)
        assert all(np.array_equal(into[run.at : run.at + 257], far.window[run.offset : run.offset + 257]) for run in runs)

    def test_no_runs_move_nothing_and_succeed(self, far: FarSide) -> None:
        """An empty batch is not an error."""
        client = Client(far)
        client.read([], np.zeros(0, np.uint8))
        client.write([], np.zeros(0, np.uint8))
        client.read([Run(0, 0, 0)], np.zeros(0, np.uint8))

    def test_four_threads_on_one_reach_never_mix_their_bytes(self, far: FarSide) -> None:
        """A reach is shared by all threads of a worker; each payload says who wrote it and in which round."""
        client, region, rounds = Client(far), 4 * MIB, 12
        far.window[:] = 0

        def work(who: int) -> None:
            into = np.zeros(region, np.uint8)
            for turn in range(rounds):
                length = region - 8 * turn * (who + 1)
                payload = np.full(length // 8, who << 32 | turn, np.uint64).view(np.uint8)
                client.write([Run(who * region, length, 0)], payload)
                client.read([Run(who * region, length, 0)], into)
                if not np.array_equal(into[:length], payload):
                    raise UnavailableError(f"thread {who}, round {turn}: bytes of another write")

        workers = [in_thread(lambda who=who: work(who)) for who in range(4)]  # type: ignore[misc]
        for thread, _ in workers:
            thread.join(PATIENCE_NS / SECOND)
        assert not any(thread.is_alive() for thread, _ in workers)
        assert [caught for _, caught in workers] == [[], [], [], []]

    def test_deadline_already_passed_refused_and_the_reach_lives_on(self, far: FarSide) -> None:
        """Too late is the caller's news, not the connection's end."""
        client, into = Client(far), np.zeros(8, np.uint8)
        far.window[:8] = 9
        with pytest.raises(DeadlineError):
            client.read([Run(0, 8, 0)], into, time.monotonic_ns() - 1)
        with pytest.raises(DeadlineError):
            client.write([Run(0, 8, 0)], into, time.monotonic_ns() - 1)
        client.read([Run(0, 8, 0)], into)
        assert into.tolist() == [9] * 8

    def test_run_out_of_bounds_refused_before_any_byte_moves(self, far: FarSide) -> None:
        """A run outside the arena would reach foreign memory; outside the buffer, the caller's. Not even the good runs before it move."""
        client, into = Client(far), np.zeros(64, np.uint8)
        far.window[:64] = 1
        beyond = far.arena_bytes - far.offset
        for bad in (Run(beyond - 1, 2, 8), Run(beyond, 1, 8), Run(-far.offset - 1, 1, 8), Run(0, -1, 8), Run(0, 8, 57), Run(0, 1, -1)):
            with pytest.raises(ConfigError):
                client.read([Run(0, 8, 0), bad], into)
            with pytest.raises(ConfigError):
                client.write([Run(0, 8, 0), bad], into)
        assert not into.any()
        assert far.window[:64].all()

    def test_use_after_close_refused_and_closing_twice_is_fine(self, far: FarSide) -> None:
        """A closed reach says so instead of failing in some other way."""
        client, into = Client(far), np.zeros(8, np.uint8)
        client.read([Run(0, 8, 0)], into)
        client.reach.close()
        client.reach.close()
        with pytest.raises(ClosedError):
            client.read([Run(0, 8, 0)], into)
        with pytest.raises(ClosedError):
            client.write([Run(0, 8, 0)], into)

    def test_owner_killed_while_idle_ends_every_call_soon(self, far: FarSide) -> None:
        """A dead node is an error (or, where its memory outlives it, still the right bytes): never a crash, never a hang."""
        client, into = Client(far), np.zeros(MIB, np.uint8)
        far.window[:] = 3
        client.read([Run(0, MIB, 0)], into)
        far.kill()
        for _ in range(2):
            self._read_from_the_dead(client, into)
        client.reach.close()

    def test_owner_killed_while_a_read_is_on_the_way_ends_it_soon(self, far: FarSide) -> None:
        """The owner is frozen first, so that the read is certainly on the way when it dies."""
        client, into = Client(far), np.zeros(16 * MIB, np.uint8)
        far.window[:] = 3
        client.read([Run(0, 1, 0)], into)
        far.freeze()
        thread, caught = in_thread(lambda: client.read([Run(0, 16 * MIB, 0)], into))
        thread.join(0.2)
        goes_on = far.outlives_owner or far.serves_frozen
        assert thread.is_alive() or goes_on
        far.kill()
        thread.join(PATIENCE_NS / SECOND)
        assert not thread.is_alive()
        assert (len(caught) == 1 and isinstance(caught[0], _GONE)) or (goes_on and not caught and bool((into == 3).all()))

    def test_owner_killed_while_a_write_is_on_the_way_ends_it_soon(self, far: FarSide) -> None:
        """As for reads; how many bytes had arrived does not matter."""
        client, source = Client(far), np.ones(16 * MIB, np.uint8)
        client.write([Run(0, 1, 0)], source)
        far.freeze()
        thread, caught = in_thread(lambda: client.write([Run(0, 16 * MIB, 0)], source))
        thread.join(0.2)
        goes_on = far.outlives_owner or far.serves_frozen
        assert thread.is_alive() or goes_on
        far.kill()
        thread.join(PATIENCE_NS / SECOND)
        assert not thread.is_alive()
        assert goes_on or [type(error) for error in caught if isinstance(error, _GONE)]

    def test_owner_hangs_deadline_holds_and_nothing_arrives_later(self, far: FarSide) -> None:
        """After the deadline the buffer is the caller's again: what the node sends on waking up must not land in it."""
        client, into = Client(far), np.zeros(16 * MIB, np.uint8)
        far.window[:] = 3
        client.read([Run(0, 1, 0)], into)
        far.freeze()
        try:
            if far.outlives_owner or far.serves_frozen:
                client.read([Run(0, 16 * MIB, 0)], into)
            else:
                with pytest.raises(DeadlineError):
                    client.read([Run(0, 16 * MIB, 0)], into, soon(200 * MS))
        finally:
            far.thaw()
        into[:] = 7
        probe = np.zeros(1, np.uint8)
        Client(far).read([Run(0, 1, 0)], probe)
        assert probe[0] == 3
        assert bool((into == 7).all())

    def test_close_while_a_read_hangs_ends_it(self, far: FarSide) -> None:
        """Shutting a worker down does not wait for a node that hangs."""
        client, into = Client(far), np.zeros(16 * MIB, np.uint8)
        client.read([Run(0, 1, 0)], into)
        far.freeze()
        try:
            thread, caught = in_thread(lambda: client.read([Run(0, 16 * MIB, 0)], into))
            thread.join(0.2)
            client.reach.close()
            thread.join(PATIENCE_NS / SECOND)
            assert not thread.is_alive()
            assert (not caught and (far.outlives_owner or far.serves_frozen)) or isinstance(caught[0], (ClosedError, *_GONE))
        finally:
            far.thaw()

    def _read_from_the_dead(self, client: Client, into: Bytes) -> None:
        into[:] = 0
        try:
            client.read([Run(0, MIB, 0)], into)
        except _GONE:
            assert not client.far.outlives_owner
        else:
            assert client.far.outlives_owner
            assert bool((into == 3).all())
