"""The hand-off from prefill to decode: who is to decode is settled when the prefill is sent, so that its blocks can go there at once.

The prefill worker pushes what it finishes to the pool nodes on the decode worker's host too, as near copies, and the first load there is
local. Until the decode begins the decode worker is counted as busy with the request: otherwise all that are being prefilled would be
meant for the one that is idle now. When it begins the choice is made again, with a preference for what was planned (`router/policy.py`).
"""

from contextlib import ExitStack

from kvpool.policy.placement import NodeState
from kvpool.request import MAX_HAND_OFF
from router.fleet import Fleet
from router.pool import PoolView, placed_nodes
from router.worker import Worker


def nodes_beside(view: PoolView, source: str, target: str) -> tuple[str, ...]:
    """Ids of the pool nodes on host `target` that take near copies, in the order in which its readers ask them; at most `MAX_HAND_OFF`.

    None when `source`, the prefill worker's host, is the same one, when `target` is unknown (""), or when the cluster wants no near copies.
    """
    if target in ("", source) or not view.config.near_copies:
        return ()
    return tuple(node.id for node in placed_nodes(view) if node.host == target and node.state is NodeState.ACTIVE)[:MAX_HAND_OFF]


class Planned:
    """The decode worker with which one request is to go on, if any, and the request's place there. A context manager: it ends the plan."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._worker: Worker | None = None
        self._place = ExitStack()

    def take(self, worker: Worker, tokens: int) -> None:
        """Plan for `worker`, and count the request there, with `tokens` of KV."""
        self.release()
        self._place.enter_context(self._fleet.busy(worker, 0, decode_tokens=tokens))
        self._worker = worker

    def release(self) -> Worker | None:
        """End the plan and give the place back; whose it was."""
        worker, self._worker = self._worker, None
        self._place.close()
        return worker

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.release()
