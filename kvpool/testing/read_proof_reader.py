"""A reader of the read proof: `python -m kvpool.testing.read_proof_reader ADDRESS --reach REACH --seed N`, until its standard input ends.

It gets chains of blocks, loads them and looks at them in place, and checks every word of every block that it is given. Some views stay open
for a while and are checked again at their end.
"""

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.block import BlockKey
from kvpool.client import Client
from kvpool.client.transfer import Payload
from kvpool.client.views import View
from kvpool.testing.read_proof_blocks import BLOCK_TOKENS, Model, faults, models
from kvpool.testing.read_proof_child import work
from kvpool.testing.read_proof_sabotage import SABOTAGES, dawdle, in_reader
from kvpool.units import SECOND

_TIMEOUT_S: Final = 10.0
_KEPT: Final = 2
_BLINDLY: Final = 0.05
"""Share of the reads that don't look first whether the blocks are there."""

Chain = Sequence[BlockKey]


class _Way(NamedTuple):
    """A connection for the blocks of one size, and memory for a chain of them."""

    model: Model
    client: Client
    room: npt.NDArray[np.float32]


class Reader:
    """Reads at random. `what`: what was wrong. `done`: `gets`, `loads` and `views`; `get_blocks`, `loaded_blocks` and `viewed_blocks` that
    were checked; `absent` chains; `wrong` blocks; and the client's own `hits`, `misses` and `retries`."""

    def __init__(self, address: str, reach: str, chance: random.Random) -> None:
        self.what: list[str] = []
        self._done: Counter[str] = Counter()
        self._chance = chance
        self._reach = reach
        self._ways = [_Way(model, self._client(address, model), model.room(model.longest)) for model in models()]
        self._kept: deque[tuple[View, Chain]] = deque()

    @property
    def done(self) -> Counter[str]:
        """Counts so far."""
        return sum((Counter(way.client._client.pool.direct()) for way in self._ways), self._done.copy())

    def step(self) -> None:
        """One read."""
        way = self._chance.choice(self._ways)
        chain = self._chain(way)
        if not chain:
            self._done["absent"] += 1
            return
        kinds = (self._get, self._load, self._view) if self._reach == "shm" else (self._get, self._load)
        self._chance.choice(kinds)(way, chain)
        while self._kept and (len(self._kept) > _KEPT or self._chance.random() < 0.3):
            self._let_go()

    def close(self) -> None:
        """Let go of all and disconnect."""
        while self._kept:
            self._let_go()
        for way in self._ways:
            way.client.close()

    def _client(self, address: str, model: Model) -> Client:
        return kvpool.connect(address, namespace=model.namespace, transport=self._reach, timeout_s=_TIMEOUT_S)

    def _chain(self, way: _Way) -> Chain:
        """Blocks to read: on this host mostly such as are there now, for what isn't is a question to the node."""
        chain = self._chance.choice(way.model.chains)
        if self._reach == "shm" and self._chance.random() >= _BLINDLY:
            chain = chain[: way.client._client.pool._core.here.leading(chain)]
        return chain[:1] if self._chance.random() < 0.3 else chain

    def _get(self, way: _Way, chain: Chain) -> None:
        got = way.client.get_blocks(chain, way.room[: len(chain)])
        self._check(chain, got.blocks, "get")
        self._done += Counter(gets=1, get_blocks=got.tokens // BLOCK_TOKENS)

    def _load(self, way: _Way, chain: Chain) -> None:
        """In place, as workers do."""

        def sink(index: int, payload: Payload) -> None:
            self._check(chain[index : index + 1], [payload], "load")
            dawdle()
            self._check(chain[index : index + 1], [payload], "load, at its end")

        deadline_ns = time.monotonic_ns() + int(_TIMEOUT_S * SECOND)
        loading = way.client._client.pool.load(chain, 0, [BLOCK_TOKENS] * len(chain), sink, deadline_ns=deadline_ns)
        self._done += Counter(loads=1, loaded_blocks=way.client._run(loading))

    def _view(self, way: _Way, chain: Chain) -> None:
        view = way.client.view_blocks(chain)
        self._check(chain, view.blocks, "view")
        self._done += Counter(views=1, viewed_blocks=len(view.blocks))
        self._kept.append((view, chain))

    def _let_go(self) -> None:
        view, chain = self._kept.popleft()
        with view:
            dawdle()
            self._check(chain, view.blocks, "view, at its end")
            if not view.valid():
                self._done["invalid_views"] += 1

    def _check(self, chain: Chain, blocks: Sequence[npt.NDArray[Any]] | npt.NDArray[Any], how: str) -> None:
        for fault in faults(chain, list(blocks)):
            self._done["wrong"] += 1
            self.what.append(f"{how}: {fault}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.read_proof_reader")
    parser.add_argument("address")
    parser.add_argument("--reach", choices=tuple(SABOTAGES), required=True)
    parser.add_argument("--sabotage", default="")
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    random.seed(args.seed)
    with in_reader(args.reach, args.sabotage):
        reader = Reader(args.address, args.reach, random.Random(args.seed))
        work(reader.step, lambda: reader.done, reader.what)
        reader.close()


if __name__ == "__main__":
    main()
