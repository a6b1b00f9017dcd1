"""Who brings which block: each has one who brings it, and nobody waits in a circle."""

import random
from collections.abc import Sequence

import pytest

from kvpool.block import BlockKey, chain_keys
from kvpool.engine.coming import Coming, Part
from kvpool.engine.schedule.work import Work

SIZE = 4


def keys_of(tokens: Sequence[int]) -> list[BlockKey]:
    return chain_keys(bytes(32), tokens, SIZE)


def part_of() -> Part:
    return Part(Work(keys=(), known=0, usable=0, limit=0))


def test_first_that_lacks_a_block_brings_it_and_the_next_one_what_is_left() -> None:
    """Two prompts with one beginning: the second one waits for that, and a third for both."""
    coming, one, two, three = Coming(), part_of(), part_of(), part_of()
    shared, longer = keys_of([1] * 8), keys_of([1] * 16)
    assert coming.claim(one, shared) is None
    assert coming.claim(two, longer) is one
    assert coming.claim(three, longer) is one
    assert coming.claim(three, longer[2:]) is two
    assert (len(one.keys), len(two.keys), len(three.keys), len(coming)) == (2, 2, 0, 4)


def test_who_has_ended_brings_nothing_and_the_first_to_ask_brings_it_then() -> None:
    """Its claims are free again, once; what others have taken over stays theirs."""
    coming, one, two, three = Coming(), part_of(), part_of(), part_of()
    keys = keys_of([1] * 12)
    coming.claim(one, keys)
    coming.take(two, keys[2:])
    coming.end(one)
    coming.end(one)
    assert len(coming) == 1
    assert coming.claim(three, keys) is None
    assert coming.claim(three, keys[2:]) is two
    coming.end(two)
    coming.end(three)
    assert len(coming) == 0


def test_nobody_waits_for_who_is_held_up_by_its_reader() -> None:
    """That may take for ever."""
    coming, one, two = Coming(), part_of(), part_of()
    keys = keys_of([1] * 8)
    coming.claim(one, keys)
    one.work.paused = True
    assert coming.claim(two, keys) is None
    one.work.paused = False
    assert coming.claim(two, keys) is one


def test_load_is_wanted_by_its_sequence_or_by_who_waits() -> None:
    """When neither is there it may end."""
    part = part_of()
    wanted = [part.wanted]
    part.gone = True
    wanted.append(part.wanted)
    with part.awaited(), part.awaited():
        wanted.append(part.wanted)
    assert [*wanted, part.wanted] == [True, False, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_somebody_always_moves_on(seed: int) -> None:
    """Sequences that come, bring, end and vanish in any order: of those that are there one at least waits for nobody."""
    rng = random.Random(seed)
    coming = Coming()
    named: set[BlockKey] = set()
    chains: dict[Part, list[BlockKey]] = {}
    bringing: set[Part] = set()

    def missing(part: Part) -> list[BlockKey]:
        return [key for key in chains[part] if key not in named]

    def leave(part: Part) -> None:
        coming.end(part)
        bringing.discard(part)
        del chains[part]

    for _ in range(400):
        if len(chains) < 8:
            chains[part_of()] = keys_of([rng.randrange(2) for _ in range(SIZE)] * rng.randrange(1, 6))
        for part in chains:
            if part not in bringing and coming.claim(part, missing(part)) is None:
                bringing.add(part)
        assert bringing
        part = rng.choice(list(chains))
        if part in bringing:
            named.update(missing(part)[: rng.randrange(4)])
        if not missing(part) or rng.random() < 0.2:
            leave(part)
        if not chains:
            named.clear()  # nobody holds them any more
    for part in list(chains):
        leave(part)
    assert len(coming) == 0
