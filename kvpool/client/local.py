"""A node of this host, from a client on it: its arena and its board in this process, and the session with it.

Theory. What is on the board is read without asking anybody (`here.py`); what is to be written is asked for over the session
(`putting.py`), at a fraction of the cost of a call by gRPC. The session's end is the node's: from then on nothing is found here any more,
and the connection is made anew. What somebody still reads stays mapped, so that the last bytes of a dead node are right, if of no use.

The node gives away what a session holds when its socket ends. So the socket is kept until nobody of this process looks at held
bytes or writes to granted ones, however early the reach is closed: each of them is a *user* between `enter` and `leave`.

A board's generation says whether bytes were still those of a block after they were copied. That takes memory with one owner for good. On a
memory device, which a successor takes over, checksums are looked at too.
"""

import logging
import threading
from pathlib import Path

from kvpool.client.slabs import Slabs
from kvpool.errors import ClosedError, KvpoolError, UnavailableError
from kvpool.request.pool import ShmOffer
from kvpool.tier import ArenaMapping
from kvpool.tier.board import BoardReader, Cell
from kvpool.tier.mappable import is_device, map_to_read
from kvpool.tier.superblock import SUPERBLOCK_BYTES, decode_superblock
from kvpool.transport import ShmReach
from kvpool.transport.reach import Bytes
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session_client import Session

log = logging.getLogger(__name__)


class LocalReach(ShmReach):
    """`ShmReach` to a node of this host; once it has joined the node, blocks are found and written there without gRPC."""

    def __init__(self, mapping: ArenaMapping) -> None:
        super().__init__(mapping)
        self._path = mapping.path
        self._superblock = mapping.superblock
        self._frozen: Bytes | None = None
        self._lock = threading.RLock()  # the garbage collector may end a view, and so call `leave`, in the midst of a call
        self._users = 0
        self._ended = False
        self._cell: Cell | None = None
        self.node_id = mapping.superblock.node_id.hex()
        self.session: Session | None = None
        self.board: BoardReader | None = None
        self.slabs: Slabs | None = None
        self.by_generation = not is_device(mapping.path)
        """Whether an unchanged generation is enough for bytes that never left this host's memory."""

    def join(self, offer: ShmOffer, node: NodeIdentity, owner: str, timeout_s: float) -> bool:
        """Open a session with the node; False, with the reason in the log, when that can't be had: the reach works without one."""
        cell: Cell | None = None
        session: Session | None = None
        try:
            cell = Cell.create()
            session = Session.open(offer.session, node, owner, cell.fd, timeout_s)
            board = BoardReader(session.board_fd, cell, node.node_id, node.incarnation)
        except (KvpoolError, OSError) as error:
            log.warning("node %s: no session, so every block is asked for by gRPC: %s", node.node_id[:8], error)
            for opened in (session, cell):
                if opened is not None:
                    opened.close()
            return False
        self._cell, self.session, self.board = cell, session, board
        self.slabs = Slabs(session, self._superblock.capacity)
        return True

    @property
    def alive(self) -> bool:
        """Whether the node is there and its board true. A look at the socket."""
        session = self.session
        return session is not None and not self._ended and session.alive

    @property
    def memory(self) -> Bytes:
        """The data region, to write granted ranges. Raises `ClosedError`."""
        return self._open_data()

    @property
    def frozen(self) -> Bytes:
        """The data region, mapped so that no write is possible; mapped at first use. Raises `ClosedError`, `UnavailableError`."""
        frozen = self._frozen
        if frozen is not None:
            return frozen
        with self._lock:
            if self._ended:
                raise ClosedError("this reach is closed; open another one")
            if self._frozen is None:
                self._frozen = self._map_frozen()
            return self._frozen

    @property
    def room_to_hold(self) -> int:
        """How many more blocks of this node may be held now."""
        cell = self._cell
        return 0 if cell is None else cell.shape.holds - cell.active

    def enter(self) -> bool:
        """Become a user of held or granted bytes; False when it is too late for that. Then `leave` is owed."""
        with self._lock:
            if self._ended or self.session is None:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """A user's end."""
        with self._lock:
            self._users -= 1
            last = self._ended and not self._users
        if last:
            self._end()

    def give_back_idle(self) -> None:
        """Give back slabs that nobody has used for a while. Blocks for a message each."""
        if self.slabs is not None and self.enter():
            try:
                self.slabs.give_back_idle()
            finally:
                self.leave()

    def close(self) -> None:
        """Unmap and end the session as soon as the last user has left; twice is fine."""
        super().close()
        with self._lock:
            first, self._ended = not self._ended, True
            self._frozen = None
            last = first and not self._users
        if last:
            self._end()

    def _end(self) -> None:
        if self.session is not None:
            self.session.close()
        if self._cell is not None:
            self._cell.close()

    def _map_frozen(self) -> Bytes:
        memory = map_to_read(Path(self._path)).memory
        if decode_superblock(memory[:SUPERBLOCK_BYTES].tobytes()) != self._superblock:
            raise UnavailableError(f"arena {self._path} is another node's by now")
        start = self._superblock.data_offset
        return memory[start : start + self._superblock.capacity]
