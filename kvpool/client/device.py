"""Blocks between the pool and a caller's CUDA tensors. Blocking, for any thread; loaded when the first such tensor comes.

    from a node of this host   arena -> device, by the copy engine, while the blocks are held
    from elsewhere             wire -> a page-locked buffer -> device, a buffer at a time
    to a node of this host     device -> granted range of the arena, by the copy engine; then the checksum, while the bytes are in the cache
    to others                  device -> the buffer that is sent

The order is what makes it right. What the caller has queued on its stream is waited for first, by the caller's deadline and before anything
is held or granted. Then: hold, begin the copies, wait for them, look whether the session was there all the time, let go. Nothing returns
while a copy runs, so there is no event for the caller to wait for.

Gets read the arena through the mapping that puts write to, although they only read: so that an arena is page-locked once, not once
for reading (which not every device can) and once for writing.
"""

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpool.block import BlockKey, Geometry
from kvpool.client.arrays import blocks_shape
from kvpool.client.held import Held
from kvpool.client.here import Limits
from kvpool.client.nearby import Nearby
from kvpool.client.pool import AsyncPoolClient
from kvpool.client.putting import filling
from kvpool.client.writing import Wish
from kvpool.errors import ClosedError, ConfigError
from kvpool.transport.cuda import cuda_of
from kvpool.transport.device import Device, Pins, Rows
from kvpool.transport.reach import Bytes
from kvpool.units import MIB, SECOND

BATCH = 64
"""Blocks that are held at once."""
STAGE_BYTES = 32 * MIB
"""Of the page-locked buffer, or one block that is larger."""

Run = Callable[[Coroutine[Any, Any, int]], int]
"""Runs a coroutine on the client's event loop."""


class DeviceBlocks:
    """Gets and puts of one client, whose nodes of this host are `nearby`, for tensors on any device."""

    def __init__(self, nearby: Nearby, pool: AsyncPoolClient, run: Run, timeout_s: float) -> None:
        self._nearby, self._pool, self._run = nearby, pool, run
        self._core = nearby.core
        self._timeout_ns = int(timeout_s * SECOND)
        self._geometry = pool.namespace.geometry
        self._row_bytes = self._geometry.payload_bytes(self._geometry.block_tokens)
        self._devices: dict[str, Device] = {}
        self._pins = Pins()
        self._idle: list[Bytes] = []

    def get(self, chain: Sequence[BlockKey], out: Any) -> int:
        """Fill the first blocks of the CUDA tensor `out` with the leading blocks of `chain`; how many came. See `Client.get_blocks`."""
        device, rows = self._on_device(out)
        deadline_ns = time.monotonic_ns() + self._timeout_ns
        wanted = chain[: len(rows)]
        if not wanted or not device.settled(deadline_ns):
            return 0
        done = self._get_here(device, wanted, rows, Limits(deadline_ns))
        return done if done == len(wanted) else self._get_far(device, wanted, rows, done, deadline_ns)

    def put(self, chain: Sequence[BlockKey], blocks: Any, wish: Wish) -> int:
        """Make the blocks of `chain`, which lie in a CUDA tensor, present; how many the pool holds now. See `Client.put_blocks`."""
        device, rows = self._on_device(blocks)
        if len(rows) != len(chain):
            raise ConfigError(
                f"the tokens make {len(chain)} blocks of {self._geometry.block_tokens}, but {len(rows)} were given; pass x[:{len(chain)}]"
            )
        deadline_ns = time.monotonic_ns() + self._timeout_ns
        if not device.settled(deadline_ns):
            return 0

        def fill(index: int, payload: Bytes) -> None:
            try:
                device.to_host(payload, rows[index])
            finally:
                device.wait()

        self._lock_arenas(device)
        if self._nearby.write_by(chain, filling(self._core.framer, fill, range(len(chain))), wish):
            return len(chain)
        counts = [self._geometry.block_tokens] * len(chain)
        storing = self._pool.store(
            chain, 0, counts, fill, deadline_ns=deadline_ns, ttl_ns=wish.ttl_ns, retention=wish.retention, tenant=wish.tenant
        )
        return self._run(storing)

    def _get_here(self, device: Device, chain: Sequence[BlockKey], rows: Rows, limits: Limits) -> int:
        """The leading blocks that nodes of this host have, straight from their arenas."""
        self._lock_arenas(device)
        done = came = 0
        while done < len(chain) and not limits.over():
            held = self._core.here.hold(chain[done : done + BATCH])
            if held is None:
                break
            with held:
                came = self._copy_held(device, held, chain[done : done + BATCH], rows[done:])
            if not came:
                break
            done += came
        return done

    def _copy_held(self, device: Device, held: Held, keys: Sequence[BlockKey], rows: Rows) -> int:
        """Copy what is held; how many blocks have come. 0 when its session ended meanwhile: then the holds ended, too."""
        starts = self._core.here.shown(held, keys, [self._geometry.block_tokens] * len(keys))
        try:
            memory = held.reach.memory
        except ClosedError:
            return 0
        _copy(device, rows[: len(starts)], [memory[start : start + self._row_bytes] for start in starts])
        if not held.reach.alive:
            return 0
        held.touch(len(starts))
        return len(starts)

    def _get_far(self, device: Device, chain: Sequence[BlockKey], rows: Rows, done: int, deadline_ns: int) -> int:
        """Blocks from `done` on, from wherever they are, through a page-locked buffer; how many leading blocks there are then."""
        with self._stage(device) as stage:
            while done < len(chain):
                targets = list(stage[: len(chain) - done])
                came = self._run(self._pool.load_into(chain, done, targets, deadline_ns=deadline_ns))
                if came:
                    _copy(device, rows[done : done + came], targets[:came])
                done += came
                if came < len(targets):
                    break
        return done

    @contextmanager
    def _stage(self, device: Device) -> Iterator[Bytes]:
        """A page-locked buffer, uint8 `[n, payload bytes]`, one for each call that runs at the same time.

        After a failure it is not used again: a transfer that was given up may still write to it.
        """
        try:
            stage = self._idle.pop()
        except IndexError:
            count = max(1, STAGE_BYTES // self._row_bytes)
            stage = device.page_locked(count * self._row_bytes).reshape(count, self._row_bytes)
        yield stage
        self._idle.append(stage)

    def _lock_arenas(self, device: Device) -> None:
        """Page-lock the arenas of this host's nodes, before anything is held: the first time takes long."""
        for reach in self._core.links.locals:
            try:
                memory = reach.memory
            except ClosedError:
                continue
            self._pins.lock(memory, device)

    def _on_device(self, blocks: Any) -> tuple[Device, Rows]:
        """The device of `blocks`, and their bytes, a row a block. Raises `ConfigError` for blocks that aren't this pool's."""
        check_blocks(blocks, self._geometry)
        name = str(blocks.device)
        device = self._devices.get(name)
        if device is None:
            device = self._devices.setdefault(name, cuda_of(blocks))
        return device, device.rows(blocks, self._row_bytes)


def _copy(device: Device, rows: Rows, sources: Sequence[Bytes]) -> None:
    try:
        device.to_device(rows, sources)
    finally:
        device.wait()


def check_blocks(blocks: Any, geometry: Geometry) -> None:
    """Raise `ConfigError`, saying what to do, unless the torch tensor `blocks` has the pool's element type, shape and a plain layout.

    Rows of bytes, uint8 `[n, payload bytes]`, fit every pool.
    """
    shape, dtype = tuple(blocks.shape), str(blocks.dtype).removeprefix("torch.")
    row_bytes = geometry.payload_bytes(geometry.block_tokens)
    as_bytes = dtype == "uint8" and len(shape) == 2 and shape[1] == row_bytes
    wanted = blocks_shape(geometry, 1)[1:]
    if not as_bytes and dtype not in (geometry.dtype, "uint8"):
        raise ConfigError(f"blocks of this pool are {geometry.dtype}, got {dtype}; pool blocks are stored as they are computed")
    if not as_bytes and (dtype == "uint8" or shape[1:] != wanted or not shape):
        of_bytes = f"uint8 [n, {row_bytes}]"
        elements = f"{geometry.dtype} [n, {', '.join(map(str, wanted))}] or " if len(wanted) > 1 else ""
        raise ConfigError(f"blocks must be {elements}{of_bytes}, got {dtype} {list(shape)}; x.view(...) changes a shape without a copy")
    if not blocks.is_contiguous():
        raise ConfigError("blocks must be contiguous in memory; pass x.contiguous() to put, and an own torch.empty(...) to get into")
