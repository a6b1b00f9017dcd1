"""What workers hold in `bench.router_index`, for every contestant the same. Nothing here needs more than the standard library.

One document of 128K tokens that every fourth worker holds whole and the others less of, each to another length; and conversations that
branch off it behind its 512th block at the latest, of 128 blocks each, which one worker holds.
"""

from collections.abc import Iterator

TOKENS = 131_072
BLOCK_TOKENS = 16
BLOCKS = TOKENS // BLOCK_TOKENS
BRANCH, TAIL, TOLD = 512, 128, 512
SIZES = {"8k": 8192, "128k": TOKENS}
WORKERS = (8, 64, 1000)
MOST_TALKS = 4096


def held(workers: int, worker: int) -> int:
    """Leading blocks of the document that `worker` holds."""
    return BLOCKS if worker % 4 == 0 else BLOCKS * (worker + 1) // (workers + 1)


def parts(workers: int, worker: int) -> Iterator[tuple[int, int]]:
    """The events that tell of them: from which block to which."""
    end = held(workers, worker)
    return ((start, min(end, start + TOLD)) for start in range(0, end, TOLD))


def talks(workers: int) -> int:
    """Conversations of each worker."""
    return min(64, max(1, MOST_TALKS // workers))


def branch(workers: int, worker: int) -> int:
    """Behind how many blocks of the document its conversations branch off."""
    return min(BRANCH, held(workers, worker))
