"""Deterministic simulation of a cluster: real nodes and clients over simulated links, time and membership store."""

from kvpool.testing.sim.cluster.marks import CLUSTER_MARKS
from kvpool.testing.sim.cluster.run import ClusterSimulation, run_cluster
from kvpool.testing.sim.cluster.world import ClusterWorld, draw_cluster

__all__ = ["CLUSTER_MARKS", "ClusterSimulation", "ClusterWorld", "draw_cluster", "run_cluster"]
