"""What a healed pool must still be able to do: take new blocks until it is full, and give them back."""

from collections.abc import Iterator
from hashlib import sha256

from kvpool.block import BlockKey
from kvpool.pool import Granted, Reserve
from kvpool.testing.sim import frames
from kvpool.testing.sim.client import Client, Steps
from kvpool.testing.sim.judge import Violation

_TRIES = 200
_PARTS = 8
"""New blocks are an eighth of the pool each, and one and a half times as many as fit are put."""


def _fresh(client: Client, names: dict[BlockKey, str]) -> Iterator[tuple[BlockKey, int]]:
    length = max(frames.HEADER_BYTES + 1, client.world.capacity_bytes // _PARTS - 7)
    for number in range(_PARTS * 3 // 2):
        key = BlockKey(sha256(b"fresh %d" % number).digest())
        names[key] = f"f{number}"
        yield key, length


def fill(client: Client, names: dict[BlockKey, str]) -> Steps:
    """Put more new blocks than fit, one by one: each must be granted and committed."""
    client.forget_node()
    while client.identity is None:
        yield from client.connect()
    node = client.node
    for key, length in _fresh(client, names):
        node.judge.watch(tuple(names))
        for _ in range(_TRIES):
            answer = yield "reserve", (client.owner, client.world.limits.max_lease_ns, [_item(key, length)]), client.meant
            if node.below is None or (answer is not None and answer.lease_id):
                break
            yield 2 * (client.world.below.pump_ns + client.world.below.transfer_ns)
        grant = answer.grants[0] if answer is not None else None
        if not isinstance(grant, Granted):
            raise Violation(f"a healed pool of {node.pool.books()} answers {grant} for {length} bytes")
        node.arena.view[grant.offset : grant.offset + length] = frames.make_frame(key, length, next(client.salts))
        if (yield "commit", (answer.lease_id, [key]), client.meant) != (True,):
            raise Violation(f"a healed pool doesn't commit {names[key]}")


def _item(key: BlockKey, length: int) -> Reserve:
    return Reserve(key, None, 0, length, tenant="fresh")


def read_back(client: Client, names: dict[BlockKey, str]) -> Steps:
    """Read everything that is there: new blocks validate, and the pool is reasonably full."""
    node, owner = client.node, client.owner
    wanted = [*((block.key, block.length) for block in client.world.blocks), *_fresh(client, names)]
    for first in range(0, len(wanted), 4):
        part = wanted[first : first + 4]
        answer = yield "acquire", (owner, client.world.limits.max_lease_ns, [key for key, _ in part]), client.meant
        if answer is None or not answer.lease_id:
            continue
        suspects = [
            key
            for (key, length), at in zip(part, answer.found, strict=True)
            if at is not None and not _takes(client, key, length, at.offset)
        ]
        if any(names[key].startswith("f") for key in suspects):
            raise Violation(f"a healed pool damaged {[names[key] for key in suspects]}")
        yield "release", (answer.lease_id, tuple(suspects)), client.meant
    if node.below is None and node.pool.locate(wanted[-1][0]) is None:
        raise Violation(f"{names[wanted[-1][0]]} was the last to be put, and is gone")
    node.coverage.hit("pool filled and read back")


def _takes(client: Client, key: BlockKey, length: int, offset: int) -> bool:
    frame = bytes(client.node.arena.view[offset : offset + length])
    if not frames.opens(frame, key):
        return False
    client.node.judge.delivers(key, length, frame)
    return True
