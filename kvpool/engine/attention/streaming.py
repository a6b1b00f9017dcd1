"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first few tokens and the most recent ones.

A softmax must put its weight somewhere, and a trained model puts what it has no use for on the first tokens, its sinks. A window
that lets them go falls apart; with four of them kept it works for any length. As published, positions count within the cache: the
sinks are read as if they stood right before the window, so that no distance exceeds the cache. Keys are cached with their
rotation, and only distances matter, so that moves the sinks' keys by the number of tokens left out between them and the window.
What is beyond the window can't be reached at all.
"""

import torch

from kvpool.engine.attention.settings import StreamingSettings
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import EVERYTHING, Seen, Selection, Traits
from kvpool.errors import LocalError


class Streaming:
    """A `TokenSelector`: sinks and a window, `budget` tokens together; the same for every layer and head."""

    def __init__(self, settings: StreamingSettings) -> None:
        self.traits = Traits(scope=Scope.POSITIONS)
        self._settings = settings
        self._budget: int | None = None

    def update(self, layer: int, seen: Seen) -> None:
        """Nothing to learn: only positions count."""

    def settle(self, prompt: int) -> None:
        """At least one recent token stays beside the sinks."""
        self._budget = max(self._settings.tokens(prompt), self._settings.sinks + 1)

    def keep(self, layer: int, past: int) -> Selection:
        """Sinks, then the window."""
        if self._budget is None:
            raise LocalError("the budget of a window is known when the prompt is over: settle first")
        sinks, out = self._settings.sinks, past - self._budget
        if out <= 0:
            return EVERYTHING
        ids = torch.cat((torch.arange(sinks), torch.arange(sinks + out, past)))
        return Selection(ids[None], moved=sinks, by=out if self._settings.positions == "cache" else 0)
