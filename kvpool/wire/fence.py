"""Calls say which life of which node they mean, so that nobody talks to a stranger at a known address.

A gRPC channel reconnects by itself; after a restart another node, or another life of the same one, may listen there. Lease ids
and offsets of the old one would mean something else to it. So every call that depends on them carries (node id, incarnation)
as metadata, and a node refuses calls meant for somebody else.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvpool.errors import ConfigError, UnavailableError

KEY = "kvpool-node"


class NodeIdentity(NamedTuple):
    """One life of one node."""

    node_id: str
    incarnation: int

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As gRPC metadata."""
        return ((KEY, f"{self.node_id}/{self.incarnation}"),)


def check(metadata: Iterable[tuple[str, str | bytes]] | None, me: NodeIdentity, *, needed: bool) -> None:
    """Raise `UnavailableError` for a call meant for another than `me`, `ConfigError` for one that doesn't say though it must."""
    said = dict(metadata or ()).get(KEY)
    if said is None:
        if needed:
            raise ConfigError(f"the call doesn't say which node it means: set the metadata {KEY} to NODE_ID/INCARNATION (from Describe)")
        return
    if said != f"{me.node_id}/{me.incarnation}":
        raise UnavailableError(f"this is node {me.node_id}/{me.incarnation}, the call was meant for {said!r}")
