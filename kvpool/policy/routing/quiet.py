"""For policies that learn nothing: they are told, and forget it."""

from kvpool.policy.routing.values import Ask, Observed, Scored, WorkerRef


class Quiet:
    """The notices of `Policy`, unheard."""

    def routed(self, ask: Ask, scored: Scored, now_ns: int) -> None:
        """See `Policy.routed`."""

    def first_token(self, request_id: str, worker: WorkerRef, observed: Observed, now_ns: int) -> None:
        """See `Policy.first_token`."""

    def ended(self, request_id: str, worker: WorkerRef, now_ns: int) -> None:
        """See `Policy.ended`."""

    def forget(self, worker: WorkerRef) -> None:
        """See `Policy.forget`."""
