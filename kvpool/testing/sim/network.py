"""Messages between clients and the node: late, lost, doubled, overtaken, clogged, or cut off in one direction.

Theory. Each (client, direction) is a link with a state of its own. A *clog* holds whatever is sent until it ends, so a burst arrives at
once; a *split* drops it, in one direction only: a client whose requests arrive but whose answers don't is the hardest peer there is. A
straggler takes many times the usual delay, so that later messages overtake it. Nothing is ever altered: that the transport checks.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.world import NetworkDraw

_STRAGGLE = 20


class Network:
    """The links of one world. `healed` makes them fast and safe."""

    __slots__ = ("_clogged", "_coverage", "_draw", "_healed", "_loop", "_rng", "_split")

    def __init__(self, loop: Loop, draw: NetworkDraw, rng: Random, clients: int, coverage: Coverage) -> None:
        self._loop = loop
        self._draw = draw
        self._rng = rng
        self._coverage = coverage
        self._healed = False
        self._clogged = [[0, 0] for _ in range(clients)]  # until when; [to the node, to the client]
        self._split = [[0, 0] for _ in range(clients)]

    def send(self, client: int, back: int, deliver: Callable[..., None], *message: Any) -> None:
        """Call `deliver(*message)` when the message arrives: never, once or twice. `back` is 0 towards the node, 1 towards the client."""
        draw, random = self._draw, self._rng.random
        delay_ns = draw.delay_ns + int(random() * draw.jitter_ns)
        if self._healed:
            self._loop.after(delay_ns, deliver, *message)
            return
        now_ns = self._loop.now_ns
        if now_ns < self._split[client][back] or (draw.loss and random() < draw.loss):
            self._coverage.hit("call lost")
            return
        if draw.straggle and random() < draw.straggle:
            delay_ns *= _STRAGGLE
        clogged_ns = self._clogged[client][back]
        self._loop.at(max(now_ns, clogged_ns) + delay_ns, deliver, *message)
        if draw.twice and random() < draw.twice:
            self._coverage.hit("call delivered twice")
            self._loop.at(max(now_ns, clogged_ns) + delay_ns + int(random() * draw.jitter_ns * 8), deliver, *message)

    def clog(self, client: int, back: int, until_ns: int) -> None:
        """Hold that link's messages until then."""
        self._clogged[client][back] = until_ns

    def split(self, client: int, back: int, until_ns: int) -> None:
        """Drop that link's messages until then."""
        self._split[client][back] = until_ns

    def heal(self) -> None:
        """No more faults from here on."""
        self._healed = True
