"""What all calls of one client share: whose blocks, which nodes, threads and buffers; and how a transfer is run and its leases end."""

import asyncio
import copy
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np

from kvpool.block import KEY_BYTES, BlockKey, Namespace
from kvpool.block.frame import Framer
from kvpool.client.background import Background, outlast
from kvpool.client.here import Counts, Here, Limits
from kvpool.client.leasing import keep_alive
from kvpool.client.links import Links
from kvpool.client.plan import placements
from kvpool.client.sources import NodeRef, NodeSource
from kvpool.client.transfer import Lease, Payload, Stages, Touch, Transfer
from kvpool.errors import ClosedError, ConfigError, KvpoolError, UnavailableError
from kvpool.policy.placement import PlacedNode, Placement, place
from kvpool.transport import host_boot_id
from kvpool.wire.credentials import PLAIN, Security

log = logging.getLogger(__name__)

CONTROL_S = 2.0
"""Longest wait for one control message."""
_THREADS = 4

T = TypeVar("T")
Checksums = Literal["wire", "always"]
"""Whose checksums are looked at: only of what may have crossed a wire or a disk unchecked, or of every block."""


def check_checksums(checksums: str) -> str:
    """`checksums` if it is one of the two; `ConfigError` otherwise."""
    if checksums not in ("wire", "always"):
        raise ConfigError(f"unknown checksums {checksums!r}; choose wire or always")
    return checksums


@lru_cache(maxsize=64)
def _alone(node: PlacedNode, copies: int) -> Placement:
    """Where every extent lives when there is one node."""
    return place([BlockKey(bytes(KEY_BYTES))], 1, [node], copies)[0]


class Core:
    """The middle of one client, on one event loop."""

    def __init__(
        self, namespace: Namespace, source: NodeSource, transport: str, security: Security = PLAIN, *, checksums: Checksums = "wire"
    ) -> None:
        self.namespace = namespace
        self.block_tokens = namespace.geometry.block_tokens
        self.apart = False
        """Whether the keys of a call stand each for itself, and are no chain: see `of_values`."""
        self.fingerprint = namespace.fingerprint().hex()
        self.framer = Framer(namespace)
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.links = Links(source, transport, security, owner=self.owner)
        self.background = Background()
        self.direct = Counts()
        self.here = Here(self.links, self.framer, self.direct, always=check_checksums(checksums) == "always")
        self.host = host_boot_id()
        self.ending = asyncio.Event()
        """Set once the client is closed: for its views too."""
        self.stages = Stages(self.framer.frame_bytes(self.block_tokens))
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpool-bytes")

    def salted(self, salt: bytes) -> "Core":
        """The same connections, threads and buffers for this namespace with another salt; closed with the core that they are of."""
        view = copy.copy(self)
        view.namespace = replace(self.namespace, salt=salt)
        view.fingerprint = view.namespace.fingerprint().hex()
        view.framer = Framer(view.namespace)
        view.here = self.here.salted(view.framer)
        return view

    def of_values(self, framer: Framer) -> "Core":
        """The same connections, threads and buffers for values of one size, whose frames `framer` makes: a block each, of one token.

        Such a block follows no other, is an extent of its own, and can be had or not whatever becomes of the others of its call.
        """
        view = copy.copy(self)
        view.apart = True
        view.framer = framer
        view.here = self.here.salted(framer)
        if framer.frame_bytes(1) > self.stages.nbytes:
            view.stages = Stages(framer.frame_bytes(1))
        return view

    @property
    def closed(self) -> bool:
        """Whether nothing may begin any more."""
        return self.ending.is_set()

    @property
    def copies(self) -> int:
        """Copies wanted of each block of this namespace."""
        return self.links.config.copies_of(self.fingerprint)

    def check_open(self) -> None:
        """Raise `ClosedError` once the client is closed."""
        if self.closed:
            raise ClosedError("this client was closed")

    def placed(self, chain: Sequence[BlockKey], first: int, count: int) -> tuple[list[Placement], dict[str, NodeRef]]:
        """Where each of chain[first : first + count] lives, and all nodes by id; without a node no placements.

        Ownership follows from who is alive, for everybody alike; a node that failed a moment ago is a miss, not disowned.
        """
        self.check_open()
        live = self.links.nodes()
        refs = {ref.node_id: ref for ref in live}
        if not refs:
            self.links.look_again()
            return [], refs
        if len(refs) == 1:  # then all blocks have it in common, and a small put is not to wait for hashes of its extents
            return [_alone(live[0].placed, self.copies)] * count, refs
        nodes = [ref.placed for ref in refs.values()]
        extent_tokens = 1 if self.apart else self.links.config.extent_tokens
        return placements(chain, first, count, self.block_tokens, extent_tokens, nodes, self.copies), refs

    def sequence(self, chain: Sequence[BlockKey]) -> int:
        """Tokens of the whole prompt that a chain is of; 0 where there is none."""
        return 0 if self.apart else len(chain) * self.block_tokens

    async def move(self, transfer: Transfer, mover: Callable[[Framer, Stages, Touch], None], touch: Touch, length_ms: int) -> None:
        """Run `mover` in a worker thread, its leases kept alive meanwhile. A cancelled task stops the thread and waits for it first."""
        if not transfer.pieces:
            return
        self.check_open()
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self.threads, mover, self.framer, self.stages, touch)
        renewal = loop.create_task(keep_alive(transfer, length_ms))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            transfer.stopped.set()
            await outlast(work)  # bounded by the transfer's deadline
            if work.cancelled():  # it never began
                self.check_open()
            raise
        finally:
            renewal.cancel()
            await self._judge(transfer)

    async def in_thread(self, work: Callable[[Limits], T], deadline_ns: int) -> T:
        """`work` in a worker thread, which ends by the deadline; a cancelled task stops it and waits for it first."""
        self.check_open()
        stopped = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self.threads, work, Limits(deadline_ns, stopped))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stopped.set()
            await outlast(running)
            if running.cancelled():  # it never began
                self.check_open()
            raise

    def tokens_of(self, targets: Sequence[Payload]) -> list[int]:
        """How many tokens fill each target. Raises `ConfigError` for one that is no writable row of bytes, or fits no block."""
        each, counts = self.namespace.geometry.bytes_per_token, list[int]()
        for target in targets:
            if target.dtype != np.uint8 or target.ndim != 1 or not target.flags.c_contiguous or not target.flags.writeable:
                raise ConfigError("targets are contiguous, writable 1-D arrays of uint8, a block's payload each")
            if target.size % each or not 0 < target.size <= each * self.block_tokens:
                raise ConfigError(
                    f"a target of {target.size} bytes fits no block: {each} bytes a token, at most {self.block_tokens} tokens"
                )
            counts.append(target.size // each)
        return counts

    async def give_back_idle(self) -> None:
        """Give back room on nodes of this host that was granted in advance and that nobody has used for a while."""
        for reach in self.links.locals:
            if reach.slabs is not None and reach.slabs.idle:
                await asyncio.get_running_loop().run_in_executor(self.threads, reach.give_back_idle)

    async def _judge(self, transfer: Transfer) -> None:
        """Remember which nodes moved bytes and which did not."""
        for number in transfer.late:
            self.links.late(transfer.leases[number].link.node)
        for number in transfer.used - set(transfer.failed) - transfer.late:
            self.links.health.well(transfer.leases[number].link.node, "data")
        for number, error in transfer.failed.items():
            link = transfer.leases[number].link
            log.warning("transfer with node %s: %s", link.node.node_id[:8], error)
            reach = link.reach.name if isinstance(error, UnavailableError) else None
            await self.links.failed(link.node, "data", reach=reach, link=link)

    def let_go(self, leases: Sequence[Lease], suspect: Mapping[int, Sequence[BlockKey]]) -> None:
        """Release leases in the background: the caller has what it came for. `suspect`: keys that failed validation, by number."""

        async def release(lease: Lease, keys: Sequence[BlockKey]) -> None:
            try:
                async with self.links.control(lease.link) as rpc:
                    await rpc.release(lease.id, keys, CONTROL_S)
            except KvpoolError as error:
                log.debug("release on node %s: %s; the lease will run out", lease.link.node.node_id[:8], error)

        for number, lease in enumerate(leases):
            if lease.id:
                self.background.spawn(release(lease, suspect.get(number, ())))

    async def close(self) -> None:
        """Finish what runs in the background (bounded), disconnect."""
        await self.background.finish(CONTROL_S)
        await self.links.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
