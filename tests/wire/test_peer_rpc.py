"""What nodes ask each other, over the wire."""

from collections.abc import AsyncIterator, Sequence

import grpc.aio
import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.peer_client import PeerRpc
from kvpool.wire.peer_server import MAX_HEADS, add_peer
from kvpool.wire.pool_server import MAX_FETCH_FROM, checked_nodes

ME = NodeIdentity("ab" * 16, 7)
JOINER = NodeIdentity("cd" * 16, 3)


class Handler:
    """A node that has something left for some."""

    identity = ME

    def __init__(self) -> None:
        self.left: dict[NodeIdentity, int] = {}

    def left_for(self, node: NodeIdentity) -> int | None:
        return self.left.get(node)

    def heads(self, keys: Sequence[bytes], extent_tokens: int) -> list[bytes]:
        return [key[:1] * 32 if key[0] and extent_tokens == 512 else b"" for key in keys]


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
async def address(handler: Handler) -> AsyncIterator[str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_peer(server, handler)
    bound = bind(server, "127.0.0.1:0")
    await server.start()
    yield bound
    await server.stop(None)


async def test_hand_over_is_done_only_when_a_round_has_ended_with_nothing_left(handler: Handler, address: str) -> None:
    """Not to know is not to be done; another life of the same node is another node."""
    rpc = PeerRpc(address, ME)
    assert not await rpc.handed_over(JOINER, 10)
    handler.left[JOINER] = 3
    assert not await rpc.handed_over(JOINER, 10)
    handler.left[JOINER] = 0
    assert await rpc.handed_over(JOINER, 10)
    assert not await rpc.handed_over(JOINER._replace(incarnation=4), 10)
    await rpc.close()


async def test_another_life_of_the_asked_node_does_not_answer(handler: Handler, address: str) -> None:
    """What it pushed in an earlier life says nothing about this one."""
    handler.left[JOINER] = 0
    rpc = PeerRpc(address, ME._replace(incarnation=6))
    with pytest.raises(UnavailableError, match="meant for"):
        await rpc.handed_over(JOINER, 10)
    await rpc.close()


async def test_heads_come_one_a_key_and_not_for_everything_at_once(address: str) -> None:
    """What isn't known is empty; nobody makes a node search for long."""
    rpc = PeerRpc(address, ME)
    assert await rpc.heads([b"ab", b"\0b"], 512, 10) == [b"a" * 32, b""]
    assert await rpc.heads([b"ab"], 1024, 10) == [b""]
    with pytest.raises(ConfigError, match="at most"):
        await rpc.heads([b"a"] * (MAX_HEADS + 1), 512, 10)
    await rpc.close()


def test_fetch_from_is_bounded() -> None:
    """A caller can't make a node ask the whole world, or keep long names."""
    assert checked_nodes(["a", "b"]) == ("a", "b")
    with pytest.raises(ConfigError, match="at most"):
        checked_nodes(["a"] * (MAX_FETCH_FROM + 1))
    with pytest.raises(ConfigError, match="at most"):
        checked_nodes(["a" * 65])
