"""Prefill on one host, decode on another, a real node on each: the decode worker's first load comes out of its own host's memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster.embedded import server_binary
from kvpool.testing.hosts import Host, Hosts, unsupported

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=f"no hosts here: {unsupported()}")

OWNER, THERE = "1" * 32, "2" * 32
PROMPTS, TOKENS, BLOCK_TOKENS = 4, 77, 8
BLOCKS = -(-TOKENS // BLOCK_TOKENS)
ASK = """
import asyncio, json, sys, time
from dataclasses import asdict, replace
from kvpool.clock import MonotonicClock
from kvpool.cluster import open_membership
from kvpool.request import Sampling
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.worker_client import WorkerClient
from router.assemble import build_dispatcher
from router.job import Job, Trace
from router.pool import NodesProbe
from router.settings import Limits

url, prompts, length, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
end_ns = time.monotonic_ns() + int(seconds * 1e9)


def there(view):
    nodes = [member.info.get("state") for member in view if member.role == "node"]
    return nodes == ["active"] * 2 and {member.role for member in view} >= {"prefill", "decode"}


async def main(membership):
    rpcs = {member.id: PoolRpc(member.address) for member in membership.members("node")}

    async def counted():
        return {node_id: (await rpc.describe(20)).counters for node_id, rpc in rpcs.items()}

    limits, clock, probe = Limits(direct_tokens=0, pool_timeout_s=1.0), MonotonicClock(), NodesProbe(membership, PoolRpc)
    dispatcher = build_dispatcher(model="tiny", view=membership, connect=WorkerClient, probe=probe, limits=limits, clock=clock)
    dispatcher.fleet.start()
    for near in (True, False):
        await asyncio.to_thread(membership.configure, lambda config: replace(config, near_copies=near))
        while membership.config.near_copies is not near:
            await asyncio.sleep(0.05)
        for number in range(prompts):
            prompt = tuple((31 * i * i + 7 * number + 100 * near) % 256 for i in range(length))
            before, trace = await counted(), Trace(arrived_ns=clock.now_ns())
            job = Job(request_id=f"r{number}", prompt=prompt, max_tokens=4, stop_tokens=(), sampling=Sampling(), deadline_ns=end_ns)
            tokens = [token async for token in dispatcher.generate(job, trace)]
            await asyncio.sleep(0.5)  # a node hears of what was read without asking at its next tick
            after = await counted()
            moved = {n: {name: after[n][name] - before[n][name] for name in ("hits", "near_fetched")} for n in rpcs}
            said = {"near": near, "tokens": len(tokens), "decode": asdict(trace.decode_sources), "moved": moved}
            print(json.dumps(said), flush=True)
    await dispatcher.close()
    for rpc in rpcs.values():
        await rpc.close()


with open_membership(url) as membership:
    membership.wait(there, end_ns)
    asyncio.run(main(membership))
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def _start(host: Host, log: Path, *command: str) -> None:
    with log.open("a") as into:
        host.popen(command, stdout=into, stderr=into)


def test_first_load_of_the_decode_worker_is_local(hosts: Hosts, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are owned by the node beside the prefill worker, yet it serves none of them; without near copies it serves them all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = hosts[0], hosts[1]
    url = f"redis://{one.address}:6379/0?cluster=hand-off"
    store = [str(server_binary()), "--bind", one.address, "--port", "6379", "--dir", str(tmp_path), "--save", "", "--protected-mode", "no"]
    _start(one, tmp_path / "store", *store)
    shared = ("--cluster", url)
    for host, node_id, weight in ((one, OWNER, "1e12"), (two, THERE, "1")):
        flags = ("--listen", f"{host.address}:7000", "--capacity", "32MiB", "--id", node_id, "--weight", weight)
        _start(host, tmp_path / host.name, sys.executable, "-m", "kvpool.node", *shared, *flags)
    for host, role in ((one, "prefill"), (two, "decode")):
        flags = ("--listen", f"{host.address}:0", "--model", str(tiny), "--served-model-name", "tiny", "--resident", "0")
        _start(host, tmp_path / role, sys.executable, "-m", f"{role}_worker", *shared, *flags, "--block-tokens", str(BLOCK_TOKENS))
    asked = one.popen([sys.executable, "-c", ASK, url, str(PROMPTS), str(TOKENS), "150"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = asked.communicate(timeout=200)
    assert asked.returncode == 0, err
    said: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [one["near"] for one in said] == [True] * PROMPTS + [False] * PROMPTS
    assert all((one["tokens"], one["decode"]) == (4, {"resident": 0, "pool": TOKENS, "computed": 0}) for one in said)
    local = {THERE: {"hits": BLOCKS, "near_fetched": 0}, OWNER: {"hits": 0, "near_fetched": 0}}
    assert local in [one["moved"] for one in said[:PROMPTS]]  # not all: a push that a busy machine holds up for half a second is given up
    assert [one["moved"][OWNER]["hits"] for one in said[PROMPTS:]] == [BLOCKS] * PROMPTS
