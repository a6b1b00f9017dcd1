"""A writer of the read proof: `python -m kvpool.testing.read_proof_writer ADDRESS --remote REACH --seed N`, until its standard input ends.

It puts chains of blocks as fast as it can: over its session, by slab or by reserve and commit, and some by `--remote`. With `--late` it
leaves out that who has given back a lease writes no more.
"""

import argparse
import asyncio
import random
from collections import Counter
from typing import Final

import kvpool
from kvpool.client import Client
from kvpool.request.pool import Outcome, Reservation
from kvpool.testing.read_proof_blocks import Model, fill, models
from kvpool.testing.read_proof_child import work
from kvpool.tier import ArenaMapping
from kvpool.units import KIB, MIB
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

_FAR: Final = 0.1
"""Share of the puts that don't go over the session."""
_CALL_S: Final = 2.0
_LATE_S: Final = 0.05
_STEP: Final = 16 * KIB


class Writer:
    """Puts at random. `done`: `puts`, `put_blocks` that the node has then, `refused` ones."""

    def __init__(self, address: str, remote: str, chance: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._chance = chance
        self._models = [(model, model.room(model.longest), self._clients(address, model, remote)) for model in models()]

    def step(self) -> None:
        """One put."""
        model, rows, (near, far) = self._chance.choice(self._models)
        chain = self._chance.choice(model.chains)
        some = rows[: len(chain)]
        fill(chain, some)
        held = (far if self._chance.random() < _FAR else near).put_blocks(chain, some)
        self.done += Counter(puts=1, put_blocks=held, refused=len(chain) - held)

    def close(self) -> None:
        """Disconnect."""
        for _, _, clients in self._models:
            for client in clients:
                client.close()

    def _clients(self, address: str, model: Model, remote: str) -> tuple[Client, Client]:
        near, far = (kvpool.connect(address, namespace=model.namespace, transport=way, timeout_s=5.0) for way in ("shm", remote))
        return near, far


async def late(address: str, chance: random.Random) -> None:
    """Write a few bytes to where nothing may be written any more: the lease has been given back."""
    asked = PoolRpc(address)
    node = await asked.describe(_CALL_S)
    await asked.close()
    rpc = PoolRpc(address, NodeIdentity(node.node_id, node.incarnation))
    lease_id, grants = await rpc.reserve("late", 1000, [Reservation(chance.randbytes(32), b"", 0, MIB)], _CALL_S)
    if lease_id:
        await rpc.release(lease_id, (), _CALL_S)
    await rpc.close()
    if node.shm is None:
        raise AssertionError("this node offers no shared memory")
    await asyncio.sleep(_LATE_S)
    with ArenaMapping.open(node.shm.path, node.node_id, node.incarnation) as arena:
        for outcome, offset in grants:
            if outcome is Outcome.GRANTED:
                arena.data[offset + _STEP // 2 : offset + MIB : _STEP] ^= 0xFF


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.read_proof_writer")
    parser.add_argument("address")
    parser.add_argument("--remote", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--late", action="store_true")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    writer = Writer(args.address, args.remote, chance)

    def step() -> None:
        writer.step()
        if args.late and chance.random() < _FAR:
            asyncio.run(late(args.address, chance))

    work(step, lambda: writer.done)
    writer.close()


if __name__ == "__main__":
    main()
