"""Bulk copies between two arrays in this process: the part `shm` and `memory` share."""

from collections.abc import Sequence

import numpy as np

from kvpool.transport.reach import Bytes, Run, check_deadline
from kvpool.units import MIB

# One copy call; the deadline is looked at in between. numpy releases the GIL inside.
_STEP = 16 * MIB


def copy_out(arena: Bytes, runs: Sequence[Run], into: Bytes, deadline_ns: int) -> None:
    """Arena to buffer. Raises `DeadlineError` between two steps."""
    check_deadline(deadline_ns)
    for offset, length, at in runs:
        _copy(into[at : at + length], arena[offset : offset + length], deadline_ns)


def copy_in(arena: Bytes, runs: Sequence[Run], source: Bytes, deadline_ns: int) -> None:
    """Buffer to arena. Raises `DeadlineError` between two steps."""
    check_deadline(deadline_ns)
    for offset, length, at in runs:
        _copy(arena[offset : offset + length], source[at : at + length], deadline_ns)


def _copy(target: Bytes, source: Bytes, deadline_ns: int) -> None:
    for start in range(0, target.size, _STEP):
        check_deadline(deadline_ns)
        np.copyto(target[start : start + _STEP], source[start : start + _STEP])
