"""`kvpool rate` and `kvpool quota` on real nodes that keep limits, with an operator's token and without."""

import asyncio
import uuid
from pathlib import Path

from click.testing import CliRunner, Result

from kvpool.cli.main import cli
from kvpool.cluster import open_membership
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.policy.rates import TenantLimits
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable, new_token
from kvpool.units import MIB
from kvpool.wire.guard import Guard


async def run(*arguments: str) -> Result:
    """A command, while the node's loop goes on."""
    return await asyncio.to_thread(CliRunner().invoke, cli, list(arguments))


async def test_limits_are_set_by_an_operator_and_outlive_the_node(tmp_path: Path) -> None:
    """A user's token is refused; what was set is there again after a restart."""
    tokens, book = tmp_path / "tokens", tmp_path / "tenants.json"
    for name, rights in (("root", ["admin", "read"]), ("user", ["read"])):
        (tmp_path / name).write_text(new_token(tokens, name=name, tenant=None, rights=rights, now_s=0)[1])
    url = f"memory://{uuid.uuid4().hex}"

    def node() -> PoolNode:
        guard = Guard(tokens=TokenTable(tokens), book=TenantBook(book))
        return PoolNode(NodeConfig(capacity_bytes=MIB, offers=("grpc",), arena_directory=tmp_path, guard=guard), membership)

    membership = open_membership(url)
    first = node()
    await first.start()
    as_root, as_user = ("--token-file", str(tmp_path / "root")), ("--token-file", str(tmp_path / "user"))
    done = await run(*as_root, "rate", "acme", "--requests-per-s", "7", "--bytes-per-s", "2MiB", "--cluster", url)
    assert done.exit_code == 0, done.output
    done = await run(*as_root, "quota", "acme", "--set", "64KiB", "--cluster", url)
    assert done.exit_code == 0, done.output
    refused = await run(*as_user, "rate", "acme", "--cluster", url)
    assert refused.exit_code == 2
    assert "needs the right admin" in refused.output
    stranger = await run("rate", "acme", "--cluster", url)
    assert stranger.exit_code == 2
    assert "wants a token" in stranger.output
    await first.stop()
    assert TenantBook(book).limits("acme") == TenantLimits(max_bytes=64 << 10, requests_per_s=7.0, bytes_per_s=float(2 << 20))
    again = node()
    await again.start()
    assert again.pool is not None
    assert again.pool.quotas()["acme"].max_bytes == 64 << 10
    await again.stop()
    await asyncio.to_thread(membership.close)


async def test_node_that_keeps_no_limits_says_so(tmp_path: Path) -> None:
    """Instead of forgetting them at the next restart."""
    url = f"memory://{uuid.uuid4().hex}"
    membership = open_membership(url)
    node = PoolNode(NodeConfig(capacity_bytes=MIB, offers=("grpc",), arena_directory=tmp_path), membership)
    await node.start()
    told = await run("rate", "acme", "--requests-per-s", "7", "--cluster", url)
    assert told.exit_code == 1
    assert "--tenants" in told.output
    await node.stop()
    await asyncio.to_thread(membership.close)
