"""A pool node for the occasion: a process on this machine that ends with this one."""

import asyncio
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvpool.cluster.child import KILL_WAIT_S, Child
from kvpool.errors import UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

START_S = 60.0
_GRACE_S = 5.0
_ASK_S = 5.0
_SERVES = re.compile(r"node [0-9a-f]{32} serves .* at (\S+) over")


class LocalNode:
    """`python -m kvpool.node` with `capacity` bytes and `flags`; it serves once this returns. Raises `UnavailableError` with its log."""

    def __init__(self, capacity: int, flags: Sequence[str] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvpool-bench-")
        self._log = Path(self._directory.name) / "node.log"
        argv = (sys.executable, "-m", "kvpool.node", "--capacity", str(capacity), *flags)
        self._child = Child(argv, log_path=self._log)
        try:
            self.address = self._wait_serving()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def kill(self) -> None:
        """As `kill -9`; it is dead when this returns."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(KILL_WAIT_S)

    def close(self) -> None:
        """Stop it."""
        self._child.stop(_GRACE_S)
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait_serving(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._child.exit_code is None:
            found = _SERVES.search(self._log.read_text())
            if found:
                return found[1]
            time.sleep(0.02)
        raise UnavailableError(f"the node did not start: {self._log.read_text()[-2000:]}")


def identify(address: str, security: Security = PLAIN) -> tuple[str, NodeIdentity]:
    """`address` and who serves there now. Raises `UnavailableError`, `DeadlineError`, `AccessError`."""
    told = asyncio.run(_describe(address, security))
    return address, NodeIdentity(told.node_id, told.incarnation)


async def _describe(address: str, security: Security) -> NodeDescription:
    rpc = PoolRpc(address, security=security)
    try:
        return await rpc.describe(_ASK_S)
    finally:
        await rpc.close()
