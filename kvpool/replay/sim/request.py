"""One request of a simulation, and what became of it."""

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.block import BlockKey


class SimRequest(NamedTuple):
    """Arrival in seconds, lengths in tokens, the keys of its prompt's blocks (the last one may be partial)."""

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[BlockKey, ...]
    session: str = ""
    tenant: str = ""
    adapter: str = ""


@dataclass(slots=True)
class Fate:
    """What became of one request. Times in seconds; a request ends in exactly one of `finished_s`, `rejected_s` (None: not so)."""

    request: SimRequest
    worker: int = -1
    decoder: int = -1
    hit_tokens: int = 0
    """Prompt tokens that were not computed for it."""
    compute_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    rejected_s: float | None = None
    step_s: float = 0.0
    """Mean time between its tokens."""

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrived_s

    @property
    def wasted(self) -> bool:
        """Prefilled for nothing."""
        return self.rejected_s is not None and self.compute_s > 0
