"""Do readers of a board ever get wrong bytes? `python -m kvpool.testing.board_proof --seconds 300 --readers 4 [--sabotage NAME] [--json]`.

One process owns a board and an arena of a few extents. As fast as it can it publishes blocks, withdraws them, moves them, and overwrites
their bytes the moment nobody may look any more. The others find blocks, copy them and look again, or hold them and look at them in place,
sometimes for long. Every payload describes itself: all its words are the same, and say whose they are. Now and then a reader is killed in
the middle of that, and another one comes.

`wrong` counts blocks that a reader took for sound and that weren't. A sabotage leaves one step out on purpose, and then it must not stay 0:

    reader   a copy is taken without a second look at the generation
    hold     a hold is taken without a second look at the generation
    owner    bytes are given away though somebody holds them
    order    the owner looks at holds first and withdraws then
"""

import argparse
import json
import mmap
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey
from kvpool.tier.board import Board, BoardReader, Cell, Found, Hold, Place

SABOTAGES: Final = ("", "reader", "hold", "owner", "order")
NODE: Final = "b0" * 16
INCARNATION: Final = 7
_WORDS: Final = 2048  # of 8 bytes, an extent
_EXTENTS: Final = 64
_KEYS: Final = 40
_POISON: Final = (1 << 64) - 1
_KILL_S: Final = 5.0
_START_S: Final = 30.0
_GRACE_S: Final = 20.0

Words = npt.NDArray[np.uint64]


def key_of(number: int) -> BlockKey:
    """A key, another one for each number."""
    return BlockKey(sha256(b"board proof %d" % number).digest())


_ALL_KEYS: Final = [key_of(number) for number in range(_KEYS)]


@dataclass(kw_only=True)
class Tally:
    """What happened. `wrong` must stay 0; `caught_s` is when it didn't, seconds after all readers had been started."""

    sabotage: str
    readers: int
    seconds: float = 0.0
    wrong: int = 0
    caught_s: float | None = None
    killed: int = 0
    left_held: int = 0
    done: Counter[str] = field(default_factory=Counter)

    @property
    def as_expected(self) -> bool:
        """Wrong bytes if something was sabotaged; else none, every hold gone, no reader broken down, and something done at all."""
        is_sound = self.wrong == self.left_held == self.done["crashed"] == 0 and min(self.done["copied"], self.done["held"]) > 0
        return self.wrong > 0 if self.sabotage else is_sound


class Owner:
    """Publishes, withdraws, moves and overwrites; one of the sabotages may be its own."""

    def __init__(self, board: Board, arena: Words, chance: random.Random, sabotage: str) -> None:
        self.board = board
        self.done: Counter[str] = Counter()
        self._arena, self._chance, self._sabotage = arena, chance, sabotage
        self._free = list(range(_EXTENTS))
        self._where: dict[int, tuple[int, int]] = {}
        self._doomed: dict[int, list[int]] = {}
        self._version = 0

    def step(self) -> None:
        """One change."""
        number = self._chance.randrange(_KEYS)
        if number not in self._where:
            self._put(number)
        elif self._chance.random() < 0.5:
            self._remove(number)
        else:
            self._move(number)
        if self._doomed:
            self._drain(self._chance.choice(list(self._doomed)))

    def drain_all(self) -> int:
        """Withdraw everything; how many blocks are still held."""
        for number in list(self._where):
            self._remove(number)
        for number in list(self._doomed):
            self._drain(number)
        return len(self._doomed) + self.board.holding()

    def _put(self, number: int) -> None:
        if self._free:
            self._version += 1
            extent = self._free.pop(self._chance.randrange(len(self._free)))
            words = self._chance.randrange(1, _WORDS + 1)
            self._extent(extent)[:words] = number << 40 | self._version % (1 << 40)
            self._publish(number, extent, words)
            self.done["put"] += 1

    def _remove(self, number: int) -> None:
        self.done["removed"] += 1
        extent, _ = self._where[number]
        if self._withdraw(number):
            self._give_back(extent)

    def _move(self, number: int) -> None:
        extent, words = self._where[number]
        if self._free and self._withdraw(number):
            target = self._free.pop(self._chance.randrange(len(self._free)))
            self._extent(target)[:words] = self._extent(extent)[:words]
            self._give_back(extent)
            self._publish(number, target, words)
            self.done["moved"] += 1

    def _publish(self, number: int, extent: int, words: int) -> None:
        self._where[number] = (extent, words)
        if not self.board.publish(_ALL_KEYS[number], extent * _WORDS * 8, words * 8):
            raise AssertionError("a board with room for all has none")

    def _withdraw(self, number: int) -> bool:
        """Whether its bytes are nobody's now; else they are doomed."""
        extent, _ = self._where.pop(number)
        if self._is_doomed(_ALL_KEYS[number]):
            self._doomed.setdefault(number, []).append(extent)
            self.done["doomed"] += 1
            return False
        return True

    def _is_doomed(self, key: BlockKey) -> bool:
        before = self._sabotage == "order" and self.board.held(key)
        after = self.board.withdraw(key)
        return before if self._sabotage == "order" else after and self._sabotage != "owner"

    def _drain(self, number: int) -> None:
        if not self.board.held(_ALL_KEYS[number]):
            for extent in self._doomed.pop(number):
                self._give_back(extent)
                self.done["drained"] += 1

    def _give_back(self, extent: int) -> None:
        self._extent(extent)[:] = _POISON
        self._free.append(extent)

    def _extent(self, extent: int) -> Words:
        return self._arena[extent * _WORDS : (extent + 1) * _WORDS]


class _Blind(BoardReader):
    """One that doesn't look again."""

    def unchanged(self, found: Found, start: int, stop: int) -> bool:
        return True

    def still(self, place: Place) -> bool:
        return True


class Reader:
    """Finds, copies, holds and checks. `done`: `copied` and `held` blocks, `changed` ones, `wrong` ones."""

    def __init__(self, copier: BoardReader, holder: BoardReader, arena: Words, chance: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._copier, self._holder, self._arena, self._chance = copier, holder, arena, chance
        self._kept: deque[tuple[Hold, list[int], list[Words]]] = deque()

    def step(self) -> None:
        """One look."""
        numbers = [self._chance.randrange(_KEYS) for _ in range(self._chance.randrange(1, 5))]
        way = self._chance.randrange(3)
        if way == 0:
            self._copy(numbers)
        elif way == 1:
            self._copy_one(numbers[0])
        else:
            self._hold(numbers)
        if len(self._kept) > 4 or (self._kept and self._chance.random() < 0.1):
            self._let_go()

    def finish(self) -> None:
        """Let go of all."""
        while self._kept:
            self._let_go()

    def _copy(self, numbers: list[int]) -> None:
        found = self._copier.find([_ALL_KEYS[number] for number in numbers], time.monotonic_ns())
        places = zip(found.offsets.tolist(), found.lengths.tolist(), found.present.tolist(), strict=True)
        copies = [self._view(offset, length).copy() if here else None for offset, length, here in places]
        for index, (number, copy) in enumerate(zip(numbers, copies, strict=True)):
            if copy is None:
                self.done["absent"] += 1
            elif self._copier.unchanged(found, index, index + 1):
                self._check(number, copy, "copied")
            else:
                self.done["changed"] += 1
        self._copier.touch(found, len(numbers))

    def _copy_one(self, number: int) -> None:
        place = self._copier.find_one(_ALL_KEYS[number], time.monotonic_ns())
        if place is None:
            self.done["absent"] += 1
            return
        copy = self._view(place.offset, place.length).copy()
        if self._copier.still(place):
            self._check(number, copy, "copied")
            self._copier.touch_one(place)
        else:
            self.done["changed"] += 1

    def _hold(self, numbers: list[int]) -> None:
        found = self._holder.find([_ALL_KEYS[number] for number in numbers], time.monotonic_ns())
        count = found.leading()
        hold = self._holder.hold(found, count) if count else None
        if hold is None:
            self.done["changed"] += 1
            return
        views = [self._view(*at) for at in zip(found.offsets[:count].tolist(), found.lengths[:count].tolist(), strict=True)]
        for number, view in zip(numbers, views, strict=False):
            self._check(number, view, "held")
        if self._chance.random() < 0.5:
            self._kept.append((hold, numbers[:count], views))
        else:
            hold.release()

    def _let_go(self) -> None:
        hold, numbers, views = self._kept.popleft()
        for number, view in zip(numbers, views, strict=True):
            self._check(number, view, "held")
        hold.release()

    def _check(self, number: int, words: Words, how: str) -> None:
        value = int(words[0])
        is_right = value >> 40 == number and bool((words == value).all())
        self.done[how] += 1
        self.done["wrong"] += not is_right

    def _view(self, offset: int, length: int) -> Words:
        return self._arena[offset // 8 : (offset + length) // 8]


class _Child:
    """A reading process and its cell."""

    def __init__(self, board: Board, arena_fd: int, seed: int, sabotage: str) -> None:
        self._board = board
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "kvpool.testing.board_proof", "--sabotage", sabotage, "--seed", str(seed)]
        with theirs:
            command += ["--reader", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
        self._line.settimeout(_START_S)
        socket.send_fds(self._line, [b"board"], [board.read_fd, arena_fd])
        cell = socket.recv_fds(self._line, 16, 1)[1][0]
        self.number = board.attach(cell)
        os.close(cell)
        self._line.send(b"go")

    def ended(self) -> bool:
        """Whether it has said what it found."""
        return bool(self.process.stdout and select.select([self.process.stdout], [], [], 0)[0])

    def end(self, *, kill: bool = False) -> Counter[str]:
        """Tell it to end; what it found. Killed, it says nothing unless it had ended already. Its holds are gone."""
        if kill:
            self.process.kill()
        self._line.close()
        try:
            said = self.process.communicate(timeout=_GRACE_S)[0]
        finally:
            self.process.kill()
            self._board.detach(self.number)
        if self.process.returncode and not kill:
            return Counter(crashed=1)
        return Counter(json.loads(said)) if said else Counter()


def prove(seconds: float, readers: int = 4, sabotage: str = "", seed: int = 1) -> Tally:
    """Run for that long, or until a reader has found wrong bytes."""
    tally = Tally(sabotage=sabotage, readers=readers)
    arena_fd = os.memfd_create("board-proof")
    os.ftruncate(arena_fd, _WORDS * 8 * _EXTENTS)
    arena: Words = np.frombuffer(mmap.mmap(arena_fd, 0), np.uint64)
    board = Board.create(NODE, INCARNATION, max_blocks=4 * _EXTENTS, capacity=1 << 30)
    owner = Owner(board, arena, random.Random(seed), sabotage)
    for _ in range(10 * _KEYS):
        owner.step()
    children = [_Child(board, arena_fd, seed + number, sabotage) for number in range(readers)]
    started = time.monotonic()
    until, killing_s = started + seconds, started + _KILL_S
    try:
        while (now := time.monotonic()) < until and not any(child.ended() for child in children):
            for _ in range(200):
                owner.step()
            owner.done["touched"] += len(board.touched(4096))
            if now > killing_s and not sabotage:
                killing_s = now + _KILL_S
                tally.done += children.pop().end(kill=True)  # always the newest, so that the others' counts reach the end
                tally.killed += 1
                children.append(_Child(board, arena_fd, seed + readers + tally.killed, sabotage))
        tally.seconds = time.monotonic() - started
        while children:
            tally.done += children.pop().end()
        tally.left_held = owner.drain_all()
        tally.done += owner.done
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()
        board.close()
        os.close(arena_fd)
    tally.wrong = tally.done.pop("wrong", 0)
    tally.caught_s = tally.seconds if tally.wrong else None
    return tally


def _read(descriptor: int, sabotage: str, seed: int) -> None:
    """The reading process: until it is told to end, or something was wrong."""
    with socket.socket(fileno=descriptor) as owner:
        owner.settimeout(_START_S)
        board_fd, arena_fd = socket.recv_fds(owner, 16, 2)[1]
        cell = Cell.create()
        socket.send_fds(owner, [b"cell"], [cell.fd])
        owner.recv(16)
        arena: Words = np.frombuffer(mmap.mmap(arena_fd, 0, prot=mmap.PROT_READ), np.uint64)
        copier = (_Blind if sabotage == "reader" else BoardReader)(board_fd, cell, NODE, INCARNATION)
        holder = (_Blind if sabotage == "hold" else BoardReader)(board_fd, cell, NODE, INCARNATION)
        reader = Reader(copier, holder, arena, random.Random(seed))
        while not reader.done["wrong"] and not select.select([owner], [], [], 0)[0]:
            for _ in range(50):
                reader.step()
    reader.finish()
    print(json.dumps(reader.done), flush=True)


def main() -> None:
    """Prove, or show that a sabotage is caught."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.board_proof")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--sabotage", choices=SABOTAGES, default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--reader", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader is not None:
        with suppress(KeyboardInterrupt):
            _read(args.reader, args.sabotage, args.seed)
        return
    tally = prove(args.seconds, args.readers, args.sabotage, args.seed)
    if args.json:
        print(json.dumps(vars(tally) | {"as_expected": tally.as_expected}))
    else:
        done = ", ".join(f"{count} {name}" for name, count in sorted(tally.done.items()))
        print(f"{tally.wrong} wrong in {tally.seconds:.1f} s, {tally.readers} readers, {tally.killed} killed: {done}")
    raise SystemExit(0 if tally.as_expected else 1)


if __name__ == "__main__":
    main()
