"""WHO is alive: membership of nodes, workers and routers, in a Redis-compatible server or in memory."""

from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import ROLES, Identity, Member
from kvpool.cluster.membership import Membership, Registration, open_membership

__all__ = ["ROLES", "ClusterConfig", "Identity", "Member", "Membership", "Registration", "open_membership"]
