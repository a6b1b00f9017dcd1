"""Do readers ever get wrong bytes from a node? `python -m kvpool.testing.read_proof --seconds 300 --readers 4 [--reach shm|tcp|ucx|grpc]`.

A real node with a small arena, writers that put all the time so that it evicts and moves all the time, and readers that get, load and view
through the client library and check every word of every block. Checksums are looked at where they are by default: of bytes that crossed a
wire. Any process but the node may be stopped for a moment, and now and then one is killed.

`wrong` counts blocks that a reader was given and that weren't what they should be. At the end nothing may be held any more and the node's
books must balance. A sabotage leaves one step out on purpose, and then `wrong` must not stay 0:

    shm  reader   a copy is taken without a second look at the generation
    shm  hold     a hold is taken without a second look at the generation
    shm  unheld   views and loads hold nothing that the node could see
    shm  late     somebody writes to bytes whose lease was given back
    tcp  hold     the server doesn't look again when it has a hold, and readers look at no checksum
    tcp  unheld   the server holds nothing while it sends, and readers look at no checksum
    ucx  lease    readers give their lease back before they read, and take whatever comes

What can't fail is not offered: without checksums alone, tcp and ucx stay right by holds and leases; without those alone, by checksums
(what is damaged is a miss then). Over grpc the node itself compares every range with the lease, and copies between two events.
"""

import argparse
import asyncio
import json
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from kvpool.errors import RemoteError
from kvpool.request.pool import NodeDescription
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.read_proof_child import Child
from kvpool.testing.read_proof_sabotage import SABOTAGES
from kvpool.wire.pool_client import PoolRpc

_CAPACITY: Final = "12MiB"
_KILL_S: Final = 5.0
_LOOK_S: Final = 1.0
_STUTTER_S: Final = 0.1
_LONGEST_STOP_S: Final = 0.05
_SETTLE_S: Final = 45.0
_CALL_S: Final = 20.0
_SILENCE_S: Final = 120.0
_READER, _WRITER = "kvpool.testing.read_proof_reader", "kvpool.testing.read_proof_writer"
_COUNTED: Final = ("evicted", "moved_bytes", "inserted", "corrupt", "touches", "touches_lost", "unindexed", "refused", "broken_cells")


@dataclass(kw_only=True)
class Tally:
    """What happened. `caught_s`: when something was wrong, seconds after all had begun; `what`: in words. `left`: what is held at the end
    though nobody is there, by name; `unbalanced`: how often the books didn't add up; `unanswered`: how often the node said nothing for
    20 s, which a busy host may cause; `node`: its counters."""

    reach: str
    sabotage: str
    readers: int
    seconds: float = 0.0
    wrong: int = 0
    caught_s: float | None = None
    what: list[str] = field(default_factory=list)
    killed: int = 0
    crashed: int = 0
    unbalanced: int = 0
    unanswered: int = 0
    left: dict[str, int] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    node: dict[str, int] = field(default_factory=dict)

    @property
    def as_expected(self) -> bool:
        """Wrong bytes if something was sabotaged; else none, nothing left, all sound, and something done at all."""
        is_sound = not (self.wrong or self.left or self.crashed or self.unbalanced)
        did = min(self.done["get_blocks"], self.done["loaded_blocks"], self.node.get("evicted", 0)) > 0
        return self.wrong > 0 if self.sabotage else is_sound and did

    def add(self, child: Child) -> None:
        """What a child has done, now that it has ended."""
        self.done += child.done
        self.what += child.what


class Proof:
    """One run: a node and its readers and writers. `run`, then `end`."""

    def __init__(self, tally: Tally, writers: int, capacity: str, seed: int) -> None:
        self.tally = tally
        self._random = random.Random(seed)
        self._seeds = iter(range(seed + 1, 1 << 62))
        self._remote = "grpc" if tally.reach == "shm" else tally.reach
        offers = "shm,tcp,grpc" + (",ucx" if tally.reach == "ucx" else "")
        flags = ["--capacity", capacity, "--offer", offers]
        if tally.reach == "tcp" and tally.sabotage:
            self.node = NodeProcess(*flags, "--sabotage", tally.sabotage, module="kvpool.testing.read_proof_node")
        else:
            self.node = NodeProcess(*flags)
        self._runner = asyncio.Runner()
        self._rpc = self._runner.run(_connected(self.node.address))
        self._writers: list[Child] = []
        self._readers: list[Child] = []
        try:
            self._writers += [self._writer() for _ in range(writers)]
            self._readers += [self._reader() for _ in range(tally.readers)]
            for child in self._children:
                child.wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def _children(self) -> list[Child]:
        return [*self._readers, *self._writers]

    def run(self, seconds: float) -> None:
        """Until then, or until something is wrong."""
        started = time.monotonic()
        until, look_s, kill_s, stutter_s = started + seconds, started, started + _KILL_S, started
        while (now := time.monotonic()) < until and not any(child.what or child.crashed for child in self._children):
            if now > look_s:
                look_s = now + _LOOK_S
                self._look()
            if now > kill_s and not self.tally.sabotage:
                kill_s = now + _KILL_S
                self._kill()
            if now > stutter_s:
                stutter_s = now + _STUTTER_S
                self._stutter()
            time.sleep(0.01)
        self.tally.seconds = time.monotonic() - started

    def end(self) -> None:
        """Let all finish; the node must be as if they had never been."""
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.end()
            self.tally.add(child)
            self.tally.crashed += child.crashed
        self.tally.wrong = self.tally.done.pop("wrong", 0)
        self.tally.caught_s = self.tally.seconds if self.tally.wrong else None
        if not self.tally.sabotage:
            self._settle()

    def stop(self) -> None:
        """End what there still is."""
        for child in self._children:
            child.kill()
        self._runner.run(self._rpc.close())
        self._runner.close()
        self.node.stop()

    def _writer(self) -> Child:
        late = ["--late"] if self.tally.sabotage == "late" else []
        return Child(_WRITER, self.node.address, "--remote", self._remote, "--seed", str(next(self._seeds)), *late)

    def _reader(self) -> Child:
        flags = ["--reach", self.tally.reach, "--sabotage", self.tally.sabotage, "--seed", str(next(self._seeds))]
        return Child(_READER, self.node.address, *flags)

    def _kill(self) -> None:
        """The newest reader, and every other time the newest writer, so that most of the others' counts reach the end."""
        some, make = (self._writers, self._writer) if self.tally.killed % 3 == 2 else (self._readers, self._reader)
        child = some.pop()
        child.kill()
        self.tally.add(child)
        self.tally.killed += 1
        some.append(make())

    def _stutter(self) -> None:
        """Stop one for a moment, wherever it is."""
        process = self._random.choice(self._children).process
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(self._random.random() * _LONGEST_STOP_S)
            process.send_signal(signal.SIGCONT)

    def _look(self) -> NodeDescription:
        node = self._described()
        self.tally.unbalanced += node.free_bytes + node.used_bytes + node.pinned_bytes != node.capacity_bytes
        return node

    def _described(self) -> NodeDescription:
        """What the node says; on a busy host it may be asked more than once, as long as it runs and for `_SILENCE_S` at most."""
        until = time.monotonic() + _SILENCE_S
        while True:
            try:
                return self._runner.run(self._rpc.describe(_CALL_S))
            except RemoteError as error:
                self.tally.unanswered += 1
                ended = self.node.process.poll()
                if ended is not None or time.monotonic() > until:
                    state = "runs" if ended is None else f"ended with {ended}"
                    raise AssertionError(f"{error}; the node {state}: {''.join(self.node.log[-20:])}") from error

    def _settle(self) -> None:
        """Wait until nothing is held; what is held for too long is left."""
        until = time.monotonic() + _SETTLE_S
        while True:
            node = self._look()
            self.tally.left = {name: count for name, count in _held(node).items() if count}
            if not self.tally.left or time.monotonic() > until:
                break
            time.sleep(0.2)
        self.tally.node = {name: node.counters.get(name, 0) for name in _COUNTED}


async def _connected(address: str) -> PoolRpc:
    return PoolRpc(address)


def _held(node: NodeDescription) -> dict[str, int]:
    """What somebody holds; a session is the TCP plane's own."""
    counters = node.counters
    return {
        "read_leases": node.read_leases,
        "write_leases": node.write_leases,
        "pinned_bytes": node.pinned_bytes,
        "sessions": counters["sessions"] - 1,
        **{name: counters[name] for name in ("session_leases", "slab_bytes", "holds")},
    }


def prove(
    seconds: float, readers: int = 4, *, reach: str = "shm", sabotage: str = "", writers: int = 2, capacity: str = _CAPACITY, seed: int = 1
) -> Tally:
    """Run for that long, or until a reader was given wrong bytes."""
    proof = Proof(Tally(reach=reach, sabotage=sabotage, readers=readers), writers, capacity, seed)
    try:
        proof.run(seconds)
        proof.end()
    finally:
        proof.stop()
    return proof.tally


def main() -> None:
    """Prove, or show that a sabotage is caught."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.read_proof")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--reach", choices=tuple(SABOTAGES), default="shm")
    parser.add_argument("--sabotage", choices=sorted({name for names in SABOTAGES.values() for name in names}), default="")
    parser.add_argument("--capacity", default=_CAPACITY, help="of the node")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.sabotage and args.sabotage not in SABOTAGES[args.reach]:
        parser.error(f"over {args.reach} one may leave out: {', '.join(SABOTAGES[args.reach]) or 'nothing'}")
    tally = prove(
        args.seconds,
        args.readers,
        reach=args.reach,
        sabotage=args.sabotage,
        writers=args.writers,
        capacity=args.capacity,
        seed=args.seed,
    )
    if args.json:
        print(json.dumps(vars(tally) | {"as_expected": tally.as_expected}))
    else:
        done = ", ".join(f"{count} {name}" for name, count in sorted({**tally.done, **tally.node}.items()))
        print(f"{tally.wrong} wrong in {tally.seconds:.1f} s, {tally.readers} readers, {tally.killed} killed: {done}")
        print("\n".join([*tally.what, *(f"left: {count} {name}" for name, count in tally.left.items())]))
    raise SystemExit(0 if tally.as_expected else 1)


if __name__ == "__main__":
    main()
