"""A cluster for tests of operators' tools: nodes are twins behind real gRPC servers.

Node A holds the first two blocks of the text "a prompt", node B the last two, so that the second has two copies and the last,
a partial one, has one.
"""

from functools import partial

import click

from kvpool.testing.admin_twin import MemoryAdmin
from kvpool.testing.cli_cluster import KEYS as KEYS
from kvpool.testing.cli_cluster import NOBODY as NOBODY
from kvpool.testing.cli_cluster import ROOT as ROOT
from kvpool.testing.cli_cluster import TEXT as TEXT
from kvpool.testing.cli_cluster import CliCluster
from kvpool.testing.membership_kit import until
from kvpool.wire.admin_server import add_admin
from kvpool.wire.fence import NodeIdentity

A, B, DEAD = "a" * 32, "b" * 32, "c" * 32
STRANGER = "ee" * 32
"""A key that nobody holds."""


class TwinCluster(CliCluster):
    """The cluster; `a` and `b` are its nodes' twins."""

    def __init__(self, program: click.Command) -> None:
        super().__init__(program)
        self.a, self.b = MemoryAdmin(NodeIdentity(A, 7)), MemoryAdmin(NodeIdentity(B, 8))
        self.a.put(KEYS[:2], tenant="team")
        self.b.put(KEYS[1:2], parent=KEYS[0], depth=16)
        self.b.put(KEYS[2:], parent=KEYS[1], depth=32, n_tokens=8)
        for twin in (self.a, self.b):
            self.node(twin.identity, self.serve(partial(add_admin, handler=twin)))
        self.worker()
        self.router()
        until(self.membership, lambda view: len(view) == 4)

    def node(self, identity: NodeIdentity, address: str = NOBODY) -> None:
        """Another node joins; without an address, one that doesn't answer."""
        info = {"incarnation": str(identity.incarnation)}
        self.membership.join(role="node", id=identity.node_id, address=address, info=info)
        until(self.membership, lambda view: identity.node_id in {member.id for member in view})
