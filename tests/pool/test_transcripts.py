"""Text transcripts of the pool protocol.

A transcript is a list of commands, each followed by `----`, what the pool answered, and an empty line. The pool is audited
after every command. Run with KVPOOL_REWRITE=1 to write the answers anew, then read the diff.

    pool capacity=1KiB [limit=value ...]            a fresh pool
    reserve by=NAME for=10s at=0s NAME[<PARENT]:LENGTH[:TTL] ...
    commit lease=1 at=1s NAME ...                   acquire by=NAME for=10s at=1s NAME ...
    lookup at=1s NAME ...                           renew lease=1 for=10s at=1s
    release lease=1 at=1s                           discard NAME
    ranges lease=1 OFFSET+LENGTH ...                tick at=1s
    books | counters | story NAME

A block's depth is its parent's plus 16. Lines starting with # are comments.
"""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import Acquired, Granted, PoolLimits, PoolState, Reserve
from kvpool.units import SECOND, parse_size

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
REWRITE = os.environ.get("KVPOOL_REWRITE") == "1"


def _ns(text: str) -> int:
    return int(float(text.removesuffix("s")) * SECOND)


class Runner:
    """Executes one transcript's commands."""

    def __init__(self) -> None:
        self.depths: dict[str, int] = {}
        self.names: dict[BlockKey, str] = {}
        self.pool = PoolState(1024, PrefixLru())

    def run(self, command: str) -> str:
        verb, *words = command.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        answer: str = getattr(self, f"do_{verb}")(options, [word for word in words if "=" not in word])
        self.pool.check()
        return answer

    def key(self, name: str) -> BlockKey:
        key = BlockKey(sha256(name.encode()).digest())
        self.names[key] = name
        return key

    def do_pool(self, options: dict[str, str], _: list[str]) -> str:
        capacity = parse_size(options.pop("capacity"))
        self.pool = PoolState(capacity, PrefixLru(), PoolLimits(**{name: int(value) for name, value in options.items()}))
        return self.do_books({}, [])

    def do_reserve(self, options: dict[str, str], words: list[str]) -> str:
        items, names = [], []
        for word in words:
            chain, length, *ttl = word.split(":")
            name, _, parent = chain.partition("<")
            self.depths[name] = self.depths.get(parent, -16) + 16
            items.append(
                Reserve(
                    self.key(name),
                    self.key(parent) if parent else None,
                    self.depths[name],
                    parse_size(length),
                    _ns(ttl[0]) if ttl else 0,
                )
            )
            names.append(name)
        got = self.pool.reserve(items, owner=options["by"], lease_ns=_ns(options["for"]), now_ns=_ns(options["at"]))
        grants = [f"@{grant.offset}" if isinstance(grant, Granted) else grant.name for grant in got.grants]
        return self._lines(f"lease {got.lease_id}", names, grants)

    def do_acquire(self, options: dict[str, str], names: list[str]) -> str:
        got: Acquired = self.pool.acquire(
            [self.key(name) for name in names], owner=options["by"], lease_ns=_ns(options["for"]), now_ns=_ns(options["at"])
        )
        return self._lines(f"lease {got.lease_id}", names, [f"@{at.offset}+{at.length}" if at is not None else "miss" for at in got.found])

    def do_commit(self, options: dict[str, str], names: list[str]) -> str:
        done = self.pool.commit(int(options["lease"]), [self.key(name) for name in names], _ns(options["at"]))
        return self._lines("", names, ["yes" if ok else "no" for ok in done])

    def do_lookup(self, options: dict[str, str], names: list[str]) -> str:
        present = self.pool.lookup([self.key(name) for name in names], _ns(options["at"]))
        return " ".join(name if here else "-" for name, here in zip(names, present, strict=True))

    def do_renew(self, options: dict[str, str], _: list[str]) -> str:
        alive = self.pool.renew(int(options["lease"]), _ns(options["for"]), _ns(options["at"]))
        return "alive" if alive else "ended"

    def do_release(self, options: dict[str, str], _: list[str]) -> str:
        alive = self.pool.release(int(options["lease"]), _ns(options["at"]))
        return ("released\n" if alive else "ended before\n") + self.do_books({}, [])

    def do_discard(self, _: dict[str, str], names: list[str]) -> str:
        return self._lines("", names, ["gone" if self.pool.discard(self.key(name)) else "wasn't there" for name in names])

    def do_ranges(self, options: dict[str, str], words: list[str]) -> str:
        ranges = [(int(word.split("+")[0]), int(word.split("+")[1])) for word in words]
        return "inside" if self.pool.leased_ranges(int(options["lease"]), ranges) else "outside"

    def do_tick(self, options: dict[str, str], _: list[str]) -> str:
        return f"{self.pool.tick(_ns(options['at']))} ended\n" + self.do_books({}, [])

    def do_books(self, _: dict[str, str], __: list[str]) -> str:
        books = self.pool.books()
        assert books.free + books.used + books.pinned == books.capacity
        return (
            f"free {books.free} used {books.used} pinned {books.pinned} of {books.capacity}; "
            f"{books.blocks} blocks, {books.read_leases} read and {books.write_leases} write leases"
        )

    def do_counters(self, _: dict[str, str], __: list[str]) -> str:
        return " ".join(f"{name} {value}" for name, value in self.pool.counters().items())

    def do_story(self, _: dict[str, str], names: list[str]) -> str:
        return "\n".join(self.pool.story(self.key(names[0])))

    def _lines(self, first: str, names: list[str], answers: list[str]) -> str:
        lines = [f"{name} {answer}" for name, answer in zip(names, answers, strict=True)]
        return "\n".join([line for line in [first, *lines, self.do_books({}, [])] if line])


def _replay(text: str) -> str:
    runner, output = Runner(), list[str]()
    for block in text.strip("\n").split("\n\n"):
        command = block.partition("\n----")[0]
        output.append(command)
        real = [line for line in command.splitlines() if not line.startswith("#")]
        if real:
            output[-1] += "\n----\n" + runner.run(" ".join(real))
    return "\n\n".join(output) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_pool_replays_transcript_word_for_word(path: Path) -> None:
    """The protocol is text anyone can read; a change of behaviour is a diff in it."""
    text = path.read_text()
    replayed = _replay(text)
    if REWRITE:
        path.write_text(replayed)
    assert replayed == text or REWRITE


def test_transcripts_are_there() -> None:
    """An empty folder would pass in silence."""
    assert len(TRANSCRIPTS) >= 6
