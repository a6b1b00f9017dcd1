"""The shortest reach: the node's arena mapped into this process, moved by memcpy. The node's process takes no part."""

from collections.abc import Sequence
from typing import Protocol

from kvpool.errors import ClosedError
from kvpool.transport.copy import copy_in, copy_out
from kvpool.transport.reach import Bytes, Run, check_runs


class MappedArena(Protocol):
    """What this reach needs of a mapping (`kvpool.tier.ArenaMapping` has it)."""

    @property
    def data(self) -> Bytes:
        """The data region; byte 0 is offset 0."""
        ...

    def close(self) -> None:
        """Let the mapping go."""
        ...


class ShmReach:
    """`Reach` over a mapping, which it owns and closes.

    A dead node is not noticed: its memory stays mapped and its frozen bytes stay readable and right; who holds a lease there learns from
    the control plane that the node is gone.
    """

    name = "shm"

    def __init__(self, mapping: MappedArena) -> None:
        self._mapping: MappedArena | None = mapping
        self._data: Bytes | None = mapping.data

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.read`; `lease_id` is not used."""
        data = self._open_data()
        check_runs(runs, data.size, into, writable=True)
        copy_out(data, runs, into, deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.write`; `lease_id` is not used."""
        data = self._open_data()
        check_runs(runs, data.size, source, writable=False)
        copy_in(data, runs, source, deadline_ns)

    def close(self) -> None:
        """Unmap, once the copies under way are done; twice is fine."""
        mapping, self._mapping, self._data = self._mapping, None, None
        if mapping is not None:
            mapping.close()

    def _open_data(self) -> Bytes:
        data = self._data
        if data is None:
            raise ClosedError("this reach is closed; open another one")
        return data
