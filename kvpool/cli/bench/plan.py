"""Which cases `kvpool bench pool` measures: for each size and batch the two yardsticks, and gets and puts by each way to the pool.

Everything is written under namespaces made for the run, with a time to live: one for each way and size, because the way by which a block
came says whether its checksums are still to be looked at. A put must be of blocks that nobody has, so they are counted: after at most
`PUT_ROOM` bytes or `PUT_BLOCKS` blocks the slice ends and the run removes them again. So a run never takes more room than `room` says, and
the most that a full pool gives up for it is that much of what it values least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.block import BlockKey
from kvpool.cli.bench.caller import Caller
from kvpool.cli.bench.limits import Memcpy, RawTcp
from kvpool.cli.bench.measure import Case
from kvpool.cli.bench.space import Rows, stamp, stamped, tokens_of
from kvpool.errors import UnavailableError
from kvpool.units import MIB

BUFFERS = 128
"""At least so many blocks of each size are read in turn, in whole batches."""
PUT_ROOM, PUT_BLOCKS = 256 * MIB, 4096
_PUTS = 1 << 20
"""Chains from here on are of puts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`batch` buffers of `size` bytes a call."""

    size: int
    batch: int

    @property
    def sets(self) -> int:
        """Batches that are read in turn."""
        return -(-BUFFERS // self.batch)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.sets * self.batch * self.size

    @property
    def puts(self) -> int:
        """Puts of a slice at most, besides the one that warms up."""
        return max(1, min(PUT_ROOM // self.size, PUT_BLOCKS) // self.batch - 1)


def room(shapes: Sequence[Shape], ways: int) -> int:
    """Bytes that a run over `shapes` by so many ways takes in the pool at most, a copy."""
    return ways * sum(shape.nbytes for shape in shapes) + max((shape.puts + 1) * shape.size * shape.batch for shape in shapes)


def yardsticks(shape: Shape, copying: Memcpy, raw: RawTcp) -> list[Case]:
    """memcpy and TCP, both directions."""
    rows = np.ones((shape.batch, shape.size), np.uint8)
    turn = shape.size * shape.batch
    found = []
    for way, one, servers in (("memcpy", copying, ()), ("raw tcp", raw, (raw.pid,))):
        for op, move in (("get", one.read), ("put", one.write)):

            def run(i: int, move=move) -> None:  # type: ignore[no-untyped-def]
                move(rows, i % shape.sets * turn)

            found.append(Case(way=way, op=op, size=shape.size, batch=shape.batch, run=run, servers=servers))
    return found


class PoolCases:
    """Gets and puts of one shape by one client, and what was stored for them."""

    def __init__(self, way: str, shape: Shape, caller: Caller, ttl_s: float, servers: tuple[int, ...]) -> None:
        self._way, self._shape, self._caller, self._ttl_s, self._servers = way, shape, caller, ttl_s, servers
        self._rows: Rows = np.ones((shape.batch, shape.size), np.uint8)
        self._chains: list[list[BlockKey]] = []
        self._puts: Mapping[int, list[BlockKey]] = {}
        self._last = 0

    def fill(self) -> None:
        """Store what is read. Raises `UnavailableError` where the pool doesn't take it."""
        for number in range(self._shape.sets):
            self._chains.append(self._caller.keys(tokens_of(number, self._shape.batch)))
            self._put(self._chains[-1], stamp(self._rows, number))

    def cases(self) -> list[Case]:
        """A get and a put."""
        shape = self._shape
        get = Case(way=self._way, op="get", size=shape.size, batch=shape.batch, run=self._get, finish=self._verify, servers=self._servers)
        put = Case(
            way=self._way,
            op="put",
            size=shape.size,
            batch=shape.batch,
            run=lambda i: self._put(self._puts[i], self._rows),
            prepare=self._prepare,
            finish=self._remove_puts,
            most=shape.puts,
            servers=self._servers,
        )
        return [get, put]

    def remove(self) -> None:
        """Remove what was stored."""
        self._caller.forget([key for chain in self._chains for key in chain])

    def _get(self, i: int) -> None:
        self._last = i % self._shape.sets
        got = self._caller.get(self._chains[self._last], self._rows)
        if got != self._shape.batch:
            raise UnavailableError(f"by {self._way} only {got} of {self._shape.batch} blocks came that had been stored")

    def _verify(self) -> None:
        if not stamped(self._rows, self._last):
            raise UnavailableError(f"by {self._way} other bytes came than had been stored")

    def _put(self, chain: Sequence[BlockKey], rows: Rows) -> None:
        held = self._caller.put(chain, rows, ttl_s=self._ttl_s)
        if held != len(chain):
            raise UnavailableError(f"by {self._way} the pool took only {held} of {len(chain)} blocks; is it full of pinned ones?")

    def _prepare(self, coming: range) -> None:
        self._puts = {i: self._caller.keys(tokens_of(_PUTS + i, self._shape.batch)) for i in coming}

    def _remove_puts(self) -> None:
        self._caller.forget([key for chain in self._puts.values() for key in chain])
