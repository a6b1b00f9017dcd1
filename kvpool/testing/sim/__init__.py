"""Deterministic simulation of one node, its clients, their network and disk: `python -m kvpool.testing.sim`."""

from kvpool.testing.sim.marks import MARKS
from kvpool.testing.sim.run import Verdict, run_seed
from kvpool.testing.sim.world import World, draw_world

__all__ = ["MARKS", "Verdict", "World", "draw_world", "run_seed"]
