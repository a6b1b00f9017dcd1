"""Sessions with a real node: the same rules as for other writers, and what a session holds lives as long as its socket."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.node.service import FENCE_NS, NodeConfig
from kvpool.node.sessions import MAX_LEASES, Sessions
from kvpool.pool import PoolLimits
from kvpool.request.pool import Outcome, Slab
from kvpool.tier import reap_stale
from kvpool.units import MIB, SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.session_client import Session
from tests.node.session_node import DEADLINE_S, LENGTH, Client, Host, chain, config, keys_of, suffixes_in

GRANTED, EXISTS, NO_SPACE = Outcome.GRANTED, Outcome.EXISTS, Outcome.NO_SPACE


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with Host(config(tmp_path)) as made:
        yield made


async def slab_of(client: Client, nbytes: int) -> Slab:
    slab = await asyncio.to_thread(client.session.slab, nbytes)
    assert slab is not None
    return slab


async def test_put_from_a_slab_is_found_on_the_board_and_by_grpc(host: Host) -> None:
    """One message publishes what was written in advance, for everybody."""
    writer, reader = await host.client(), await host.client()
    slab = await slab_of(writer, 8 * LENGTH)
    blocks = chain("a", 3)
    outcomes, following, rest = await asyncio.to_thread(writer.put, slab, blocks, next_slab=2 * LENGTH)
    assert outcomes == [GRANTED] * 3
    assert following is not None
    assert (following.nbytes, rest.nbytes) == (2 * LENGTH, 5 * LENGTH)
    assert following.lease_id != slab.lease_id
    assert reader.found([*keys_of("a", 3), *keys_of("b", 1)]) == [True, True, True, False]
    rpc = PoolRpc(host.node.address, NodeIdentity(host.node.node_id, host.node.incarnation))
    assert await rpc.lookup(keys_of("a", 3), DEADLINE_S) == b"\1\1\1"
    await rpc.close()
    host.pool.check()


async def test_what_is_here_exists_and_its_bytes_go_back(host: Host) -> None:
    """Whoever writes a block second has written it, and holds no more than before."""
    client = await host.client()
    _, _, rest = await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), chain("a", 2))
    outcomes, _, rest = await asyncio.to_thread(client.put, rest, chain("a", 3))
    assert outcomes == [EXISTS, EXISTS, GRANTED]
    assert (host.pool.books().blocks, rest.nbytes) == (3, 3 * LENGTH)
    assert host.pool.books().pinned == 3 * LENGTH
    await asyncio.to_thread(client.session.release, rest.lease_id)
    assert (host.pool.books().pinned, (await host.counters())["slab_bytes"]) == (0, 0)


async def test_reserve_and_commit_publish_as_by_grpc(host: Host) -> None:
    """Larger writes get their places first; a key that wasn't granted isn't committed."""
    client = await host.client()
    blocks = chain("a", 2)
    lease_id, grants, waiting = await asyncio.to_thread(client.session.reserve, blocks)
    assert ([outcome for outcome, _ in grants], waiting) == ([GRANTED, GRANTED], False)
    for block, (_, offset) in zip(blocks, grants, strict=True):
        client.write(offset, block)
    keys = keys_of("a", 2)
    assert client.found(keys) == [False, False]
    assert await asyncio.to_thread(client.session.commit, lease_id, [*keys, b"x" * 32]) == [True, True, False]
    assert client.found(keys) == [True, True]
    assert await asyncio.to_thread(client.session.commit, lease_id, keys) == [False, False]
    place = client.board.find_one(keys[0], 1)
    assert place is not None
    assert place.flags == 0


async def test_blocks_that_came_by_the_wire_are_unverified_on_the_board(host: Host) -> None:
    """Who reads by generation alone must know which bytes nobody has checked."""
    client = await host.client()
    rpc = PoolRpc(host.node.address, NodeIdentity(host.node.node_id, host.node.incarnation))
    [block] = chain("a", 1)
    lease_id, [(_, offset)] = await rpc.reserve("w", 10_000, [block], DEADLINE_S)
    client.write(offset, block)
    assert await rpc.commit(lease_id, [block.key], DEADLINE_S) == [True]
    await rpc.close()
    place = client.board.find_one(keys_of("a", 1)[0], 1)
    assert place is not None
    assert place.flags == 1


async def test_leases_of_others_mean_nothing_to_a_session(host: Host) -> None:
    """A number is no right: neither another session's nor a gRPC caller's lease can be used, or ended."""
    one, other = await host.client(), await host.client()
    slab = await slab_of(one, 4 * LENGTH)
    lease_id, _, _ = await asyncio.to_thread(one.session.reserve, chain("a", 1))
    before = host.pool.books()

    def attack() -> None:
        assert other.session.put(slab.lease_id, chain("b", 1))[0] == [NO_SPACE]
        assert other.session.commit(lease_id, keys_of("a", 1)) == [False]
        for lease in (slab.lease_id, lease_id):
            other.session.release(lease)

    await asyncio.to_thread(attack)
    assert host.pool.books() == before
    assert (await asyncio.to_thread(one.put, slab, chain("c", 1)))[0] == [GRANTED]


async def test_call_that_makes_no_sense_is_refused_and_changes_nothing(host: Host) -> None:
    """The pool's own limits are told in words, and the session goes on."""
    client = await host.client()
    slab = await slab_of(client, 2 * LENGTH)
    before = host.pool.books()

    def refused(says: str, *args: object, **more: object) -> None:
        with pytest.raises(ConfigError, match=says):
            client.session.put(*args, **more)  # type: ignore[arg-type]

    def calls() -> None:
        refused("can't be carved", slab.lease_id, chain("a", 3))
        refused("priority", slab.lease_id, [chain("a", 1)[0]._replace(priority=101)])
        refused("length", slab.lease_id, [chain("a", 1)[0]._replace(length=0)])
        refused("tenant", slab.lease_id, chain("a", 1), tenant="t" * 300)
        with pytest.raises(ConfigError, match="at least one byte"):
            client.session.slab(0)

    await asyncio.to_thread(calls)
    assert host.pool.books() == before
    assert (await asyncio.to_thread(client.put, slab, chain("a", 2)))[0] == [GRANTED] * 2


async def test_session_has_its_share_of_leases_and_slabs(host: Host) -> None:
    """One client can't take everything: 64 leases, an eighth of the arena in slabs; all together half of it."""
    client = await host.client()
    share = host.arena.capacity // 8
    assert await asyncio.to_thread(client.session.slab, share + 64) is None
    slab = await slab_of(client, share)
    assert await asyncio.to_thread(client.session.slab, 64) is None
    await asyncio.to_thread(client.session.release, slab.lease_id)

    def take_all() -> None:
        for number in range(MAX_LEASES):
            assert client.session.reserve(chain(f"r{number}", 1))[0]

    await asyncio.to_thread(take_all)
    assert await asyncio.to_thread(client.session.reserve, chain("more", 2)) == (0, [(NO_SPACE, 0)] * 2, False)
    assert await asyncio.to_thread(client.session.slab, 64) is None
    assert (await host.counters())["session_leases"] == MAX_LEASES
    client.session.close()
    await host.until(lambda: host.pool.books().pinned == 0)
    got = [await asyncio.to_thread((await host.client()).session.slab, share) for _ in range(5)]
    assert [one is not None for one in got] == [True] * 4 + [False]


async def test_quota_of_a_tenant_holds_in_slabs_too(host: Host) -> None:
    """A tenant at its quota makes room among its own blocks, or is refused; nobody pays for it."""
    host.pool.set_quota("acme", 2 * LENGTH)
    client = await host.client()
    slab = await slab_of(client, 8 * LENGTH)
    outcomes, _, rest = await asyncio.to_thread(client.put, slab, chain("a", 3), tenant="acme")
    assert sorted(outcomes) == [GRANTED, GRANTED, NO_SPACE]
    assert host.pool.quotas()["acme"].used_bytes == 2 * LENGTH
    outcomes, _, _ = await asyncio.to_thread(client.put, rest, chain("b", 1), tenant="other")
    assert outcomes == [GRANTED]


async def test_socket_ends_and_all_that_its_session_held_goes_at_once(host: Host) -> None:
    """Slab, reservations, holds and the cell: none of them outlives the socket."""
    client, other = await host.client(), await host.client()
    _, _, rest = await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), chain("a", 2))
    await asyncio.to_thread(client.session.reserve, chain("b", 2))
    hold = client.board.hold(client.board.find(keys_of("a", 2), 1), 2)
    assert hold is not None
    counters = await host.counters()
    assert [counters[name] for name in ("sessions", "session_leases", "slab_bytes", "holds")] == [2, 2, rest.nbytes, 2]
    assert host.pool.books().pinned == rest.nbytes + 2 * LENGTH
    assert host.pool.discard(keys_of("a", 1)[0])
    assert host.pool.books().pinned == rest.nbytes + 3 * LENGTH, "a held block that went keeps its bytes"
    client.session.close()
    await host.until(lambda: host.pool.books().pinned == 0)
    counters = await host.counters()
    assert [counters[name] for name in ("sessions", "session_leases", "slab_bytes", "holds")] == [1, 0, 0, 0]
    assert other.found(keys_of("a", 2)) == [False, True]


async def test_session_that_the_node_ends_keeps_its_bytes_behind_a_fence(tmp_path: Path) -> None:
    """The process at the other end may still be writing and looking: nobody else gets its bytes before the fence is over."""
    async with Host(config(tmp_path, limits=PoolLimits(fence_ns=SECOND // 2))) as host:
        client = await host.client()
        _, _, rest = await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), chain("a", 1))
        assert client.board.hold(client.board.find(keys_of("a", 1), 1), 1) is not None
        client.session._sock.send(b"what can't be")
        server = host.node._sessions
        assert server is not None
        await host.until(lambda: not len(server))
        assert not client.session.alive
        assert host.pool.books().pinned == rest.nbytes
        counters = await host.counters()
        assert [counters[name] for name in ("sessions", "slab_bytes", "holds")] == [0, rest.nbytes, 1]
        await host.until(lambda: host.pool.books().pinned == 0)
        counters = await host.counters()
        assert [counters[name] for name in ("sessions", "slab_bytes", "holds")] == [0, 0, 0]


async def test_leases_are_renewed_for_as_long_as_the_session_lives(tmp_path: Path) -> None:
    """A writer that thinks for longer than any lease still has its places."""
    async with Host(config(tmp_path, limits=PoolLimits(max_lease_ns=SECOND // 4))) as host:
        client = await host.client()
        slab = await slab_of(client, 4 * LENGTH)
        lease_id, _, _ = await asyncio.to_thread(client.session.reserve, chain("r", 1))
        await asyncio.sleep(0.8)
        assert (await asyncio.to_thread(client.put, slab, chain("a", 1)))[0] == [GRANTED]
        assert await asyncio.to_thread(client.session.commit, lease_id, keys_of("r", 1)) == [True]
        assert host.pool.counters()["reclaimed_leases"] == 0


async def test_lease_that_ran_out_all_the_same_ends_its_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a node stood still its clients must not go on writing to what others have by then: the socket's end tells them."""
    async with Host(config(tmp_path, limits=PoolLimits(max_lease_ns=SECOND // 4))) as host:
        client, idle = await host.client(), await host.client()
        slab = await slab_of(client, 4 * LENGTH)
        assert host.pool.release(slab.lease_id, 0)  # as its deadline does
        await host.until(lambda: not client.session.alive)
        assert "ran out" in caplog.text
        assert idle.session.alive
        assert (await host.counters())["slab_bytes"] == 0


async def test_reads_from_the_board_count_as_uses(host: Host) -> None:
    """Who reads without asking still says what is worth keeping; what is gone meanwhile is passed over."""
    client = await host.client()
    await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), [*chain("a", 3), *chain("b", 2)])
    wanted = [*keys_of("a", 3), *keys_of("b", 2)]
    assert host.node.pool is not None
    heard: list[list[bytes]] = []
    sessions = _sessions(host)
    sessions.handler.on_read = lambda keys: heard.append(list(keys))
    client.board.touch(client.board.find(wanted, 1), 5)
    await host.until(lambda: host.pool.counters()["hits"] == 5)
    assert heard == [wanted[:3], wanted[3:]], "one call a chain"
    view = host.pool.view(wanted[0])
    assert view is not None
    assert view.hits == 1
    counters = await host.counters()
    assert (counters["touches"], counters["touches_lost"], counters["unindexed"]) == (5, 0, 0)


async def test_touches_of_blocks_that_are_gone_hold_up_no_others(host: Host) -> None:
    """A step that dropped some of what it took in says all the same that there may be more."""
    client = await host.client()
    await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), chain("a", 2))
    found, sessions = client.board.find(keys_of("a", 2), 1), _sessions(host)
    for count in (1, 2, 2, 1) * 150:
        client.board.touch(found, count)
    assert host.pool.discard(keys_of("a", 2)[1])
    steps = 1
    while sessions.settle():
        steps += 1
    assert (steps, host.pool.counters()["hits"]) == (3, 600)


async def test_touches_of_a_client_that_leaves_at_once_are_not_lost(host: Host) -> None:
    """A command that reads and exits within a tick counts, too."""
    client = await host.client()
    await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), chain("a", 3))
    client.board.touch(client.board.find(keys_of("a", 3), 1), 3)
    client.session.close()
    await host.until(lambda: host.pool.counters()["hits"] == 3)


async def test_node_that_leaves_takes_nothing(host: Host) -> None:
    """A drained node gets no blocks by this door either; what it has is still EXISTS."""
    client = await host.client()
    _, _, rest = await asyncio.to_thread(client.put, await slab_of(client, 8 * LENGTH), chain("a", 1))
    _sessions(host).handler.leaving = lambda: True
    assert await asyncio.to_thread(client.session.reserve, chain("a", 2)) == (0, [(EXISTS, 0), (NO_SPACE, 0)], False)
    outcomes, following, rest = await asyncio.to_thread(client.put, rest, chain("a", 2), next_slab=64)
    assert (outcomes, following) == ([EXISTS, NO_SPACE], None)
    assert await asyncio.to_thread(client.session.slab, 64) is None
    await asyncio.to_thread(client.session.release, rest.lease_id)
    assert host.pool.books().pinned == 0
    assert (await host.counters())["slab_bytes"] == 0


async def test_slab_stays_its_clients_while_the_node_leaves(host: Host) -> None:
    """The client may be writing its next blocks there already; and when the node stays after all, they are where both say."""
    client = await host.client()
    slab = await slab_of(client, 8 * LENGTH)
    _sessions(host).handler.leaving = lambda: True
    outcomes, _, rest = await asyncio.to_thread(client.put, slab, chain("a", 2))
    assert outcomes == [NO_SPACE, NO_SPACE]
    assert host.pool.books().pinned == rest.nbytes == 6 * LENGTH
    assert (await host.counters())["slab_bytes"] == rest.nbytes
    _sessions(host).handler.leaving = lambda: False
    assert (await asyncio.to_thread(client.put, rest, chain("b", 2)))[0] == [GRANTED, GRANTED]
    assert client.found([*keys_of("a", 2), *keys_of("b", 2)]) == [False, False, True, True]


async def test_near_copies_are_adopted_by_who_writes_the_block(host: Host) -> None:
    """A block that this node is to hold in its own right is no passing guest any more."""
    client = await host.client()
    [block] = chain("a", 1)
    lease_id, [(_, offset)], _ = await asyncio.to_thread(client.session.reserve, [block], near=True)
    client.write(offset, block)
    await asyncio.to_thread(client.session.commit, lease_id, [block.key])
    key = keys_of("a", 1)[0]
    assert host.pool.lookup([key], 0) == b"\4"
    outcomes, _, _ = await asyncio.to_thread(client.put, await slab_of(client, 2 * LENGTH), [block])
    assert outcomes == [EXISTS]
    assert host.pool.lookup([key], 0) == b"\1"


async def test_suspects_are_examined_and_dropped(host: Host) -> None:
    """A reader that found bytes wrong tells so by the session, with a lease or without."""
    client = await host.client()
    await asyncio.to_thread(client.put, await slab_of(client, 2 * LENGTH), chain("a", 1))
    await asyncio.to_thread(client.session.release, 0, keys_of("a", 1))  # it never was a frame
    assert client.found(keys_of("a", 1)) == [False]
    assert (await host.counters())["corrupt"] == 1


async def test_socket_lies_beside_the_arena_and_goes_with_the_node(tmp_path: Path) -> None:
    """One name, one user, no litter."""
    async with Host(config(tmp_path)) as host:
        described = await host.describe()
        assert described.shm is not None
        path = Path(described.shm.session)
        assert path == Path(described.shm.path).with_suffix(".sock")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert reap_stale(tmp_path) == ()
        client = await host.client()
    assert suffixes_in(tmp_path) == []
    with pytest.raises(UnavailableError):
        Session.open(str(path), client.node, "late", 0, 1.0)


async def test_arena_elsewhere_has_its_socket_in_the_arena_directory(tmp_path: Path) -> None:
    """A device has no room for a socket beside it."""
    (tmp_path / "d").mkdir()
    async with Host(config(tmp_path / "d", arena_path=tmp_path / "given")) as host:
        described = await host.describe()
        assert described.shm is not None
        name = f"kvpool-{host.node.node_id}-{host.node.incarnation}.sock"
        assert described.shm.session == str(tmp_path / "d" / name)
        assert reap_stale(tmp_path / "d") == (), "somebody listens there, though no arena lies beside it"
        client = await host.client()
        assert await asyncio.to_thread(client.session.slab, 64) is not None


async def test_node_without_shared_memory_has_no_sessions(tmp_path: Path) -> None:
    """Who may not map may not ask by this door."""
    async with Host(config(tmp_path, offers=("grpc",))) as host:
        assert (await host.describe()).shm is None
        assert suffixes_in(tmp_path) == [".arena"]


async def test_node_whose_socket_cannot_be_made_serves_without_sessions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients then ask by gRPC, as they do from elsewhere, and the operator reads why."""
    async with Host(config(tmp_path / "missing", arena_path=tmp_path / "given")) as host:
        described = await host.describe()
        assert described.shm is not None
        assert described.shm.session == ""
        assert "get no sessions" in caplog.text


def test_node_waits_behind_a_fence_by_default() -> None:
    """Readers by generation alone rely on it; a pool by itself has none."""
    assert NodeConfig(capacity_bytes=MIB).limits.fence_ns == FENCE_NS == 30 * SECOND


def _sessions(host: Host) -> Sessions:
    server = host.node._sessions
    assert server is not None
    assert isinstance(server._host, Sessions)
    return server._host
