"""Opaque values by an engine's own keys, on real nodes: each stands for itself, whatever batch it comes in."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import Framer
from kvpool.client.values import MAX_VALUE_BYTES, ValueClient, value_geometry, value_namespace
from kvpool.errors import ClosedError, ConfigError
from kvpool.node.cluster import NodePlace
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.pool_cluster import PoolCluster
from kvpool.transport import host_boot_id
from kvpool.units import MIB
from kvpool.wire.pool_client import PoolRpc

Bytes = npt.NDArray[np.uint8]
NBYTES = 3001
_numbers = itertools.count()


@pytest.fixture
def scope() -> list[str]:
    """Other than that of every other test."""
    return ["engine", f"model-{next(_numbers)}", "layout"]


@pytest.fixture(scope="module")
def three() -> Iterator[str]:
    """Addresses of three nodes that nobody kills."""
    nodes = [NodeProcess("--capacity", "16MiB") for _ in range(3)]
    yield ",".join(one.address for one in nodes)
    for one in nodes:
        assert one.stop() == 0, "".join(one.log)


def keys_of(count: int) -> list[bytes]:
    return [b"page-%d" % i for i in range(count)]


def value(key: bytes, nbytes: int = NBYTES) -> Bytes:
    """What belongs to a key: other bytes for each."""
    return np.random.default_rng(list(key)).integers(0, 256, nbytes, dtype=np.uint8)


def values(keys: Sequence[bytes], nbytes: int = NBYTES) -> list[Bytes]:
    return [value(key, nbytes) for key in keys]


def homes(client: ValueClient, keys: Sequence[bytes]) -> list[str]:
    """The one node that is to have each."""
    placed, _ = client._nearby.of_values(Framer(value_namespace(["any"]))).core.placed(client.keys(keys), 0, len(keys))
    return [one.targets[0] for one in placed]


def check(client: ValueClient, keys: Sequence[bytes], wanted: Sequence[bool], nbytes: int = NBYTES) -> None:
    """Exactly the `wanted` ones can be had, with the right bytes."""
    assert client.present(keys) == list(wanted)
    outs = [np.zeros(nbytes, np.uint8) for _ in keys]
    assert client.get(keys, outs) == list(wanted)
    for key, out, there in zip(keys, outs, wanted, strict=True):
        assert not there or np.array_equal(out, value(key, nbytes))


@pytest.mark.parametrize("nbytes", [1, 2, 255, 32767, 65535, 65536, 65537, 131073, 3_000_001, MAX_VALUE_BYTES])
def test_geometry_adds_up_to_any_length(nbytes: int) -> None:
    """A frame's header says how long its payload is, by layers that no model has."""
    assert value_geometry(nbytes).payload_bytes(1) == nbytes


def test_identity_is_pinned() -> None:
    """Whoever writes values in another language, or next year, must find the same places."""
    namespace = value_namespace(["sglang", "m", ""])
    assert namespace.weights_digest.hex() == "e575cae60be254886a03c2733ebf654f96db55811ae38d2bdf71f9ebfcaf78c6"
    assert namespace.root().hex() == "210b4243eef167a5b63be4a3410d4513d10fdbedd66494ad21235742ae9bdb15"
    assert Framer(namespace, geometry=value_geometry(5)).root == namespace.root()
    assert value_namespace(["a", "bc"]).root() != value_namespace(["ab", "c"]).root()


def test_put_then_get_on_one_node(node: NodeProcess, scope: list[str]) -> None:
    """The whole life of a value, with a hole in the middle of a batch."""
    with ValueClient(node.address, scope=scope) as client:
        keys = keys_of(20)
        check(client, keys, [False] * 20)
        even = keys[::2]
        assert client.put(even, values(even)) == [True] * 10
        check(client, keys, [i % 2 == 0 for i in range(20)])
        assert client.put(keys, values(keys)) == [True] * 20
        check(client, keys, [True] * 20)


@pytest.mark.parametrize("transport", ["auto", "grpc", "tcp"])
def test_other_client_finds_values_in_any_order(three: str, scope: list[str], transport: str) -> None:
    """Where a value lives depends on its key, not on the batch it came in; one that is missing hides none behind it."""
    keys = keys_of(48)
    with ValueClient(three, scope=scope) as writer:
        for start in (0, 5, 29):  # batches of several lengths
            some = keys[start : {0: 5, 5: 29, 29: 48}[start]]
            assert all(writer.put(some, values(some)))
    with ValueClient(three, scope=scope, transport=transport) as reader:
        dice = np.random.default_rng(7)
        for count in (48, 17, 1):
            chosen = [keys[i] for i in dice.permutation(48)[:count]]
            check(reader, chosen, [True] * count)
        mixed = [key for pair in zip((b"none-%d" % i for i in range(48)), keys, strict=True) for key in pair]
        check(reader, mixed, [False, True] * 48)
        assert set(reader.reaches().values()) == {"shm"} if transport == "auto" else {transport}


@pytest.mark.parametrize("transport", ["auto", "grpc", "tcp"])
def test_other_length_is_a_miss_and_harms_nobody(three: str, scope: list[str], transport: str) -> None:
    """An engine with another page size must not get a part of a page, nor take the page from those who want it."""
    keys = keys_of(6)
    with ValueClient(three, scope=scope, transport=transport) as client:
        assert all(client.put(keys, values(keys)))
        for wrong in (NBYTES - 1, NBYTES + 1, 20 << 20):
            outs = [np.empty(wrong, np.uint8)] * 6
            assert client.get(keys, outs) == [False] * 6
        check(client, keys, [True] * 6)
        lengths = [NBYTES, 10, NBYTES, NBYTES, 11, NBYTES]
        outs = [np.empty(n, np.uint8) for n in lengths]
        assert client.get(keys, outs) == [n == NBYTES for n in lengths]


def test_first_value_of_a_key_stays(node: NodeProcess, scope: list[str]) -> None:
    """Values are immutable, so a reader never finds half of one and half of another; the second writer hears that there is one."""
    with ValueClient(node.address, scope=scope) as client:
        assert client.put([b"a", b"b"], [b"old", b"long-ago"]) == [True, True]
        assert client.put([b"a", b"b", b"a"], [b"new", b"x", b"newer"]) == [True] * 3
        outs = [bytearray(3), bytearray(8), bytearray(3)]
        assert client.get([b"a", b"b", b"a"], outs) == [True] * 3
        assert outs == [b"old", b"long-ago", b"old"]


def test_scopes_and_tenants_keys_don_t_meet(node: NodeProcess, scope: list[str]) -> None:
    """Equal keys of another model, rank or layout mean other bytes."""
    keys = keys_of(3)
    with ValueClient(node.address, scope=[*scope, "rank 0"]) as one, ValueClient(node.address, scope=[*scope, "rank 1"]) as other:
        assert all(one.put(keys, values(keys)))
        check(other, keys, [False] * 3)
        check(one, keys, [True] * 3)


def test_large_and_small_values_of_many_lengths(node: NodeProcess, scope: list[str]) -> None:
    """Values above a put by slab and above a staging window go the same way; one above the arena is refused by a False."""
    with ValueClient(node.address, scope=scope) as client, ValueClient(node.address, scope=scope, transport="grpc") as far:
        lengths = [1, 77, 65536, 1 << 20, 9 << 20]
        keys = [b"%d" % n for n in lengths]
        assert client.put(keys, [value(key, n) for key, n in zip(keys, lengths, strict=True)]) == [True] * 5
        for reader in (client, far):
            outs = [np.zeros(n, np.uint8) for n in lengths]
            assert reader.get(keys, outs) == [True] * 5
            assert all(np.array_equal(out, value(key, out.size)) for key, out in zip(keys, outs, strict=True))
        assert client.put([b"too large"], [bytes(65 << 20)]) == [False]


def test_buffers_of_any_kind(node: NodeProcess, scope: list[str]) -> None:
    """Engines hand over tensors, arrays with a type and a shape, and plain memory, and get the bytes back in place."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ValueClient(node.address, scope=scope) as client:
        assert client.put([b"t", b"a", b"m"], [tensor, array, memoryview(b"abcdef")[2:]]) == [True] * 3
        out, same, plain = torch.zeros(3, 4, dtype=torch.bfloat16), np.zeros((2, 3), np.float32), bytearray(4)
        assert client.get([b"t", b"a", b"m"], [out, same, plain]) == [True] * 3
        assert torch.equal(out, tensor)
        assert np.array_equal(same, array)
        assert plain == b"cdef"


@pytest.mark.parametrize(
    ("keys", "outs", "says"),
    [
        (["text"], [bytearray(1)], "keys are a list of bytes"),
        ([b""], [bytearray(1)], "keys are a list of bytes"),
        ([b"a"], [], "1 keys, but 0 buffers"),
        ([b"a"], [bytearray()], "at least one byte"),
        ([b"a"], [b"read only"], "read-only"),
        ([b"a"], [np.zeros((4, 4))[:, ::2]], "contiguous"),
        ([b"a"], [17], "a buffer is bytes"),
    ],
)
def test_senseless_arguments_raise(node: NodeProcess, scope: list[str], keys: Any, outs: Any, says: str) -> None:
    """The caller's mistakes must not look like misses."""
    with ValueClient(node.address, scope=scope) as client, pytest.raises(ConfigError, match=says):
        client.get(keys, outs)


@pytest.mark.parametrize("bad", ["engine", [], ["a", 1], ["\ud800"]])
def test_senseless_scope_raises(bad: Any) -> None:
    """A scope that is one text by mistake would be split into its letters."""
    with pytest.raises(ConfigError, match="scope"):
        ValueClient("127.0.0.1:1", scope=bad)


def test_many_calls_in_flight(three: str, scope: list[str]) -> None:
    """Engines that poll begin many transfers and look at them later."""
    keys = keys_of(60)
    batches = [keys[i : i + 6] for i in range(0, 60, 6)]
    with ValueClient(three, scope=scope, threads=3) as client:
        puts = [client.submit_put(some, values(some)) for some in batches]
        assert all(all(put.result(60)) for put in puts)
        outs = {key: np.zeros(NBYTES, np.uint8) for key in keys}
        gets: list[Future[list[bool]]] = [client.submit_get(some, [outs[key] for key in some]) for some in batches]
        assert all(all(get.result(60)) for get in gets)
        assert all(np.array_equal(out, value(key)) for key, out in outs.items())
        assert client.submit_present([b"none", keys[0]]).result(60) == [False, True]


def test_closed_client_says_so(node: NodeProcess, scope: list[str]) -> None:
    """It is the caller's mistake, so it is no miss."""
    client = ValueClient(node.address, scope=scope)
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.present([b"a"]),
        lambda: client.get([b"a"], [bytearray(1)]),
        lambda: client.put([b"a"], [b"x"]),
        lambda: client.submit_get([b"a"], [bytearray(1)]),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_nobody_there_is_a_miss(scope: list[str]) -> None:
    """An engine goes on without its pool."""
    with ValueClient("127.0.0.1:1", scope=scope, timeout_s=1) as client:
        assert client.present([b"a", b"b"]) == [False, False]
        assert client.get([b"a"], [bytearray(1)]) == [False]
        assert client.put([b"a"], [b"x"]) == [False]


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_killed_node_takes_only_its_own_values(start_node: Callable[..., NodeProcess], scope: list[str], transport: str) -> None:
    """What others have comes in the same call, wherever in the batch it is, and the rest is a miss within the deadline."""
    nodes = [start_node() for _ in range(3)]
    source, keys = ",".join(one.address for one in nodes), keys_of(40)
    with ValueClient(source, scope=scope, transport=transport, timeout_s=20) as client:
        assert all(client.put(keys, values(keys)))
        owners = homes(client, keys)
        dead = nodes[0].node_id if nodes[0].node_id in owners else owners[0]
        next(one for one in nodes if one.node_id == dead).kill()
        left = [owner != dead for owner in owners]
        assert any(left)
        assert not all(left)
        check(client, keys, left)
        more = [b"more-%d" % i for i in range(40)]
        held = client.put(more, values(more))
        assert held == [owner != dead for owner in homes(client, more)]
        check(client, more, held)


async def test_second_copy_serves_when_the_first_is_gone(cluster: PoolCluster, scope: list[str]) -> None:
    """Values are copied as blocks are: `copies` of them, of which one is enough."""
    cluster.configure(copies=2)
    spots = [await cluster.add(host=f"far-{i}") for i in range(3)]
    keys = keys_of(24)
    client = await asyncio.to_thread(ValueClient, cluster.url, scope=scope, transport="grpc")
    assert all(await asyncio.to_thread(client.put, keys, values(keys)))
    assert sum([sum(await spot.holds(client.keys(keys))) for spot in spots]) == 48
    await asyncio.to_thread(check, client, keys, [True] * 24)
    spots[0].relay.cut()
    await asyncio.to_thread(check, client, keys, [True] * 24)
    await asyncio.to_thread(client.close)


async def test_values_of_a_far_node_are_kept_near_and_outlive_it(cluster: PoolCluster, scope: list[str], tmp_path: Path) -> None:
    """The first read brings them over, after that this host needs the far node no more."""
    places = {1: "far", 2: host_boot_id()}
    nodes = [
        PoolNode(
            NodeConfig(
                node_id=f"{number:032x}",
                capacity_bytes=16 * MIB,
                offers=("shm", "grpc"),
                arena_directory=tmp_path,
                place=NodePlace(weight=1.0, host=host),
            ),
            cluster.membership,
        )
        for number, host in places.items()
    ]
    for node in nodes:
        await node.start()
    far, here = nodes
    keys, rpc = keys_of(24), PoolRpc(here.address)
    try:
        async with asyncio.timeout(60):
            while [member.info["state"] for member in cluster.membership.members("node")] != ["active"] * 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        client = await asyncio.to_thread(ValueClient, cluster.url, scope=scope, transport="grpc")
        assert all(await asyncio.to_thread(client.put, keys, values(keys)))
        assert 0 < sum(map(bool, await rpc.lookup(client.keys(keys), 10))) < 24
        await asyncio.to_thread(check, client, keys, [True] * 24)
        async with asyncio.timeout(30):
            while not all(await rpc.lookup(client.keys(keys), 10)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await far.stop()
        await asyncio.to_thread(check, client, keys, [True] * 24)
        await asyncio.to_thread(client.close)
    finally:
        await rpc.close()
        for node in nodes:
            await node.stop()
