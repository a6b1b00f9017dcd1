"""CPU time that processes have used. Standard library only."""

import resource
from collections.abc import Sequence
from pathlib import Path


def own_cpu_s() -> float:
    """CPU seconds of this process so far, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_s_of(pids: Sequence[int]) -> float:
    """CPU seconds that the living threads of `pids` and of their children have run, to the ns (`/proc/PID/task/*/schedstat`)."""
    return sum(map(_cpu_ns, pids)) / 1e9


def _cpu_ns(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            total += int((task / "schedstat").read_text().split()[0])
            total += sum(_cpu_ns(int(child)) for child in (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return total
