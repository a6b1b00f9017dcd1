"""The simulated network."""

from random import Random

from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.network import Network
from kvpool.testing.sim.world import NetworkDraw
from kvpool.units import US


def network(loop: Loop, **faults: float) -> Network:
    settings = {"loss": 0.0, "twice": 0.0, "straggle": 0.0, **faults}
    draw = NetworkDraw(delay_ns=100 * US, jitter_ns=10 * US, clog_ns=0, split_ns=0, **settings)
    return Network(loop, draw, Random(1), 2, Coverage())


def arrivals(loop: Loop, net: Network, count: int, *, client: int = 0, back: int = 0) -> list[int]:
    got: list[int] = []
    for number in range(count):
        net.send(client, back, got.append, number)
    loop.run(events=1000)
    return got


def test_network_without_faults_delivers_each_message_once() -> None:
    """Worlds without faults must be without faults."""
    loop = Loop()
    assert sorted(arrivals(loop, network(loop), 100)) == list(range(100))
    assert loop.now_ns <= 110 * US


def test_network_loses_doubles_and_reorders_by_its_draw() -> None:
    """Each fault really happens."""
    loop = Loop()
    assert len(arrivals(loop, network(loop, loss=0.3), 200)) < 200
    loop = Loop()
    assert len(arrivals(loop, network(loop, twice=0.3), 200)) > 200
    loop = Loop()
    got = arrivals(loop, network(loop, straggle=0.2), 100)
    assert got != sorted(got)
    assert sorted(got) == list(range(100))


def test_network_split_drops_one_direction_only() -> None:
    """An asymmetric partition is the one that hurts: requests arrive, answers don't."""
    loop = Loop()
    net = network(loop)
    net.split(0, 1, 10_000 * US)
    assert arrivals(loop, net, 5, back=1) == []
    assert len(arrivals(loop, net, 5, back=0)) == 5
    assert len(arrivals(loop, net, 5, client=1, back=1)) == 5


def test_network_clog_holds_messages_until_it_ends() -> None:
    """A clog delays, it doesn't lose."""
    loop = Loop()
    net = network(loop)
    net.clog(0, 0, 5_000 * US)
    assert len(arrivals(loop, net, 5)) == 5
    assert loop.now_ns > 5_000 * US


def test_network_healed_is_fast_and_safe() -> None:
    """Liveness is asked of a healed world only."""
    loop = Loop()
    net = network(loop, loss=0.9, twice=0.9)
    net.split(0, 0, 10_000 * US)
    net.heal()
    assert sorted(arrivals(loop, net, 50)) == list(range(50))
