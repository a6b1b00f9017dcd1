"""A cluster simulated in virtual time, with production's policies, prefix index, eviction and placement (docs/routing.md)."""

from kvpool.replay.sim.cluster import Cluster
from kvpool.replay.sim.outcome import Outcome, outcome
from kvpool.replay.sim.request import Fate, SimRequest
from kvpool.replay.sim.systems import System, make_system
from kvpool.replay.sim.world import World

__all__ = ["Cluster", "Fate", "Outcome", "SimRequest", "System", "World", "make_system", "outcome"]
