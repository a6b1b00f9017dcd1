"""kvpool's contestant in `bench.pool`: one client process of a node that runs already.

`python -m bench.pool_client ADDRESS NODE_PID --reach shm --name NAME`. Each contestant reads what it has stored by its own way, for the way
that a block came says whether its checksums are still to be looked at; those of a crowd share a `--space`. What is read is looked at after
each turn: every block says who it is. Keys are made ahead, for hashing tokens isn't what is measured; the cases ending in `_hashed` hash
them each time.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version

import click
import numpy as np

from bench.peers.turns import BATCH, COPIED, LARGE, PROBED, SMALL, SMALL_KEYS, WORKING_SETS, Case, check, take_turns
from kvpool.block import BlockKey, Namespace
from kvpool.cli.bench.caller import Caller
from kvpool.cli.bench.local import identify
from kvpool.cli.bench.space import BLOCK_TOKENS, Rows, chain_of, space_of, stamp, stamped, tokens_of, wipe
from kvpool.client.core import Checksums
from kvpool.client.views import View

TINY = 4096
"""Bytes of a block that is only probed."""
PUTS = 1 << 20
"""Chains from here on are of puts."""


class Chains:
    """Cases about chains of `blocks` blocks: `sets` of them are stored and take turns to be read."""

    def __init__(self, caller: Caller, space: Namespace, blocks: int, sets: int) -> None:
        self.caller = caller
        size = space.geometry.payload_bytes(BLOCK_TOKENS)
        self._blocks, self._sets, self._space = blocks, sets, space
        self._rows = np.ones((blocks, size), np.uint8)
        self._chains = [chain_of(space, number, blocks) for number in range(sets)]
        for number, chain in enumerate(self._chains):
            check(self.caller.put(chain, stamp(self._rows, number)) == blocks, f"put of chain {number}")
        self._last = 0
        self._puts: dict[int, Sequence[BlockKey]] = {}
        wipe(self._rows)

    def gets(self, *, hashed: bool = False) -> Case:
        """Read a chain into the caller's rows; with `hashed` from its tokens on."""

        def read(i: int) -> None:
            self._last = i % self._sets
            chain = self.caller.keys(tokens_of(self._last, self._blocks)) if hashed else self._chains[self._last]
            check(self.caller.get(chain, self._rows) == self._blocks, f"get of chain {self._last}")

        def verify() -> None:
            check(stamped(self._rows, self._last), f"what was read is not chain {self._last}")
            wipe(self._rows)

        return Case(read, self._rows.nbytes, verify)

    def copies(self) -> Case:
        """The yardstick of `gets`: one thread copies the same blocks, from where they lie, to the same rows."""
        views: list[View] = []
        blocks: list[list[Rows]] = []

        def look(coming: range) -> None:
            views.extend(self.caller.look(chain) for chain in self._chains)
            blocks.extend([block.reshape(-1).view(np.uint8) for block in view.blocks] for view in views)

        def copy(i: int) -> None:
            self._last = i % self._sets
            for row, block in zip(self._rows, blocks[self._last], strict=True):
                np.copyto(row, block)

        def verify() -> None:
            blocks.clear()
            while views:
                views.pop().close()
            check(stamped(self._rows, self._last), f"what was copied is not chain {self._last}")
            wipe(self._rows)

        return Case(copy, self._rows.nbytes, verify, look)

    def puts(self) -> Case:
        """Store a chain that nobody has stored; after the turn they are removed."""

        def store(i: int) -> None:
            check(self.caller.put(self._puts[i], self._rows) == self._blocks, f"put {i}")

        def prepare(coming: range) -> None:
            self._puts = {i: chain_of(self._space, PUTS + i, self._blocks) for i in coming}

        def remove() -> None:
            self.caller.forget([key for chain in self._puts.values() for key in chain])

        return Case(store, self._rows.nbytes, remove, prepare)

    def views(self) -> Case:
        """Look at a chain without copying it."""

        def look(i: int) -> None:
            check(self.caller.view(self._chains[i % self._sets]) == self._blocks, f"view {i}")

        return Case(look)

    def probes(self, *, hashed: bool = False) -> Case:
        """Ask how much of a chain is there."""

        def ask(i: int) -> None:
            chain = self.caller.keys(tokens_of(i % self._sets, self._blocks)) if hashed else self._chains[i % self._sets]
            check(self.caller.probe(chain) == self._blocks, f"probe {i}")

        return Case(ask)


@click.command()
@click.argument("address")
@click.argument("node_pid", type=int)
@click.option("--reach", required=True)
@click.option("--name", required=True, help="What to be called.")
@click.option("--space", default="", help="Whose blocks to read, by name; its own by default.")
@click.option("--checksums", default="wire", type=click.Choice(["wire", "always"]))
@click.option("--crowd", is_flag=True, help="Only the case that many clients do at once.")
def main(address: str, node_pid: int, reach: str, name: str, space: str, checksums: Checksums, crowd: bool) -> None:
    """Take turns as a client of the node at ADDRESS, whose process is NODE_PID."""
    nodes = [identify(address)]
    with ExitStack() as stack:

        def chains(size: int, blocks: int, sets: int) -> Chains:
            made = space_of(size, salt=(space or name).encode())
            caller = stack.enter_context(Caller(address, made, reach, nodes=nodes, checksums=checksums))
            return Chains(caller, made, blocks, sets)

        batch = chains(LARGE, BATCH, WORKING_SETS)
        cases = {"get_32x1m": batch.gets()}
        if reach == "shm":
            cases[COPIED] = batch.copies()
        if not crowd:
            one, small, probed = chains(LARGE, 1, WORKING_SETS * BATCH), chains(SMALL, 1, SMALL_KEYS), chains(TINY, PROBED, 1)
            cases |= {
                "get_32x1m_hashed": batch.gets(hashed=True),
                "put_32x1m": batch.puts(),
                "get_1m": one.gets(),
                "get_64k": small.gets(),
                "get_64k_hashed": small.gets(hashed=True),
                "put_64k": small.puts(),
                "probe512": probed.probes(),
                "probe512_hashed": probed.probes(hashed=True),
            }
            if reach == "shm":
                cases["view_32"] = batch.views()
        take_turns(name, version("kvpool"), cases, [node_pid])


if __name__ == "__main__":
    main()
