"""WHO is alive: membership of nodes, workers and routers, in a Redis-compatible server or in memory."""

from kvpool.cluster.member import ROLES, Member
from kvpool.cluster.membership import Membership, Registration, open_membership

__all__ = ["ROLES", "Member", "Membership", "Registration", "open_membership"]
