"""A session stays with its worker, whatever the load.

Rendezvous hashing of (session, worker): a worker that comes or goes moves only its share. A request without a session goes to the least
busy worker.
"""

from collections.abc import Sequence

import xxhash

from kvpool.policy.routing.quiet import Quiet
from kvpool.policy.routing.sort import ranking, without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored


class SessionAffinity(Quiet):
    """The worker with the highest hash for the session first."""

    name = "session_affinity"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        prompt = ask.prompt_tokens
        if not ask.session:
            return ranking(
                self.name, "requests", [Scored(c, c.active, (("active", c.active),), *without_pulls(c, prompt)) for c in candidates]
            )
        scored = []
        for c in candidates:
            far = 1.0 - xxhash.xxh3_64_intdigest(f"{ask.session}|{c.worker.id}".encode(), seed=self._seed) / 2**64
            scored.append(Scored(c, far, (("distance", far),), *without_pulls(c, prompt)))
        return ranking(self.name, "", scored)
