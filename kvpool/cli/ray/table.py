"""The table of processes with Ray as its engine: what `ProcessTable` is for the plain launcher, `RayTable` is here.

Each process is kept by an actor (`kvpool.cli.ray.keeper`); Ray says where it runs and starts it again. This side only looks: a few
times a second it asks every actor how its process is, and tells what changed. A life is named after its actor's process; two
different names are two lives, and what an earlier life says late is ignored.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from kvpool.cli.procs import ProcessSpec
from kvpool.cli.ray.engine import RayEngine
from kvpool.cli.ray.keeper import Keeper
from kvpool.cli.ray.placement import CPUS_EACH, HERE, Group, needed, plan_groups
from kvpool.cli.ray.slot import Slot
from kvpool.cli.table import ProcessRow, ProcessTable
from kvpool.cluster.child import KILL_WAIT_S, Child
from kvpool.errors import ClosedError, ConfigError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
LOOPBACK = "127.0.0.1"
RETIRE_GRACE_S = 30.0
_THREADS_EACH = 4


class RayTable:
    """The processes of `specs`, kept running by Ray. Parameters and callbacks are those of `ProcessTable`.

    `node_bytes` is the memory of a pool node, `least` and `most` bound the workers of a role that is scaled.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        log_dir: Path,
        restart: bool = True,
        on_event: Callable[[str], None] | None = None,
        on_pid: Callable[[int, bool], None] | None = None,
        engine: RayEngine,
        node_bytes: int,
        least: Mapping[str, int] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> None:
        """Raises `ConfigError` for a cluster that Ray can't place."""
        self._engine = engine
        self._groups = {group.role: group for group in plan_groups(specs, one_host=engine.local, node_bytes=node_bytes, floor=least)}
        self._most = dict(most or {})
        self._on_event = on_event or log.info
        self._on_pid = on_pid or (lambda pid, alive: None)
        self._log_dir = log_dir
        self._restart = restart
        self._slots = [Slot(spec, self._on_event) for spec in specs]
        self._retiring: list[tuple[Slot, Any]] = []
        self._here = ProcessTable([], log_dir=log_dir, restart=restart, on_event=on_event, on_pid=on_pid)
        self._strategies: dict[str, list[Any]] = {}
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-ray-table", daemon=True)

    def adopt(self, spec: ProcessSpec, child: Child) -> None:
        """Take over a process that runs already on this machine and stays out of Ray. Only before `start`."""
        self._here.adopt(spec, child)

    def start(self) -> None:
        """Start or reach Ray and ask it for everything. Raises `ConfigError`, `UnavailableError`."""
        self._here.start()
        cpus, memory_bytes = needed(tuple(self._groups.values()), self._most)
        self._engine.open(cpus=cpus, memory_bytes=memory_bytes, on_pid=self._on_pid)
        self._strategies = {role: self._reserve(group) for role, group in self._groups.items()}
        with self._lock:
            for slot in self._slots:
                self._begin(slot)
        self._thread.start()

    def rows(self) -> tuple[ProcessRow, ...]:
        """The table as it stands; processes that are being retired are not in it."""
        now_s = time.monotonic()
        with self._lock:
            return (*self._here.rows(), *(slot.row(now_s) for slot in self._slots))

    def pids(self, role: str) -> list[int]:
        """Process ids of the running processes of `role`, by index; each on its host."""
        return [row.pid for row in self.rows() if row.role == role and row.pid is not None]

    def kill(self, role: str, index: int = 0, number: int = SIGKILL) -> int:
        """Send a signal to one process; its pid. After SIGKILL its death is known when this returns.

        Raises `ConfigError` when there is no such process or it isn't running.
        """
        if any((row.role, row.index) == (role, index) for row in self._here.rows()):
            return self._here.kill(role, index, number)
        with self._lock:
            slot = next((slot for slot in self._slots if (slot.spec.role, slot.spec.index) == (role, index)), None)
        if slot is None:
            raise ConfigError(f"there is no process {role}-{index}")
        if slot.state != "running":
            raise ConfigError(f"{slot.spec.name} is not running")
        ray = self._engine.ray
        try:
            row, _, life = ray.get(slot.actor.kill.remote(int(number)), timeout=2 * KILL_WAIT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError) as error:
            raise ConfigError(f"{slot.spec.name} is not running: {_first_line(error)}") from error
        if number == SIGKILL:
            with self._lock:
                slot.died(life, "killed by SIGKILL", time.monotonic())
        return int(row.pid)

    def scale(self, role: str, count: int) -> None:
        """Have `count` processes of `role`, which has at least one: new ones are asked for, the highest indices retire."""
        with self._lock:
            if self._stopping.is_set():
                raise ClosedError("the cluster is stopping")
            slots = [slot for slot in self._slots if slot.spec.role == role]
            self._on_event(f"{role}: {len(slots)} workers become {count}")
            for index in range(len(slots), count):
                slot = Slot(replace(slots[0].spec, index=index), self._on_event)
                self._slots.append(slot)
                self._begin(slot)
            for slot in slots[count:]:
                self._slots.remove(slot)
                if slot.state == "running":
                    self._retiring.append((slot, slot.actor.stop.remote(RETIRE_GRACE_S)))
                else:
                    self._engine.ray.kill(slot.actor, no_restart=True)  # it has yet to start: it is called off

    def hurry(self) -> None:
        """Make a `stop` under way, or to come, kill at once what hasn't ended."""
        self._hurry.set()
        self._here.hurry()

    def stop(self, grace_s: float = 10.0) -> None:
        """Stop all: rank by rank SIGTERM, and SIGKILL for what is left after `grace_s`; then Ray, if it is ours."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._engine.ray is not None:
            slots = [*self._slots, *(slot for slot, _ in self._retiring)]
            for rank in sorted({slot.spec.stop_rank for slot in slots}):
                self._stop_rank([slot for slot in slots if slot.spec.stop_rank == rank and slot.actor is not None], grace_s)
            self._release()
        self._engine.close(self._on_pid)
        self._here.stop(grace_s)

    def _reserve(self, group: Group) -> list[Any]:
        """Ask for the group's bundles; where each of its processes goes, by index. Ray grants them when it can."""
        if group.strategy == HERE:
            here = self._engine.ray.get_runtime_context().get_node_id()
            return [self._engine.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)]
        if not group.bundles:
            return []
        reserved = self._engine.ray.util.placement_group([group.bundle] * group.bundles, strategy=group.strategy)
        make = self._engine.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [make(reserved, placement_group_bundle_index=index) for index in range(group.bundles)]

    def _release(self) -> None:
        """Give the reservations back, for a Ray that goes on without us."""
        for strategy in (one for many in self._strategies.values() for one in many[:1]):
            if hasattr(strategy, "placement_group"):
                self._engine.ray.util.remove_placement_group(strategy.placement_group)

    def _begin(self, slot: Slot) -> None:
        group = self._groups[slot.spec.role]
        reserved = self._strategies[slot.spec.role]
        options = {
            "num_cpus": CPUS_EACH,
            "max_restarts": -1 if self._restart else 0,
            "max_concurrency": _THREADS_EACH,
            "scheduling_strategy": reserved[slot.spec.index] if slot.spec.index < len(reserved) else "SPREAD",
            **({"memory": group.memory_bytes} if group.memory_bytes else {}),
        }
        host = LOOPBACK if self._engine.local else None
        slot.actor = self._engine.ray.remote(Keeper).options(**options).remote(slot.spec, str(self._log_dir), host)

    def _run(self) -> None:
        ray = self._engine.ray
        looks: dict[Any, tuple[Slot, float]] = {}
        while not self._stopping.is_set():
            with self._lock:
                asked = {id(slot) for slot, _ in looks.values()}
                looks |= {slot.actor.look.remote(): (slot, time.monotonic()) for slot in self._slots if id(slot) not in asked}
            done, _ = ray.wait(list(looks), num_returns=len(looks), timeout=LOOK_EVERY_S)
            for reference in done:
                slot, asked_s = looks.pop(reference)
                if slot in self._slots:
                    self._seen(slot, asked_s, reference)
            self._finish_retired()
            self._stopping.wait(LOOK_EVERY_S)

    def _seen(self, slot: Slot, asked_s: float, reference: Any) -> None:
        """An answer, or the reason why there is none."""
        ray, now_s = self._engine.ray, time.monotonic()
        try:
            answer = ray.get(reference)
        except ray.exceptions.ActorDiedError as error:
            with self._lock:
                slot.gave_up(_first_line(error), now_s)
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            with self._lock:
                slot.died(slot.life, f"lost: {_first_line(error)}", now_s)
        else:
            with self._lock:
                slot.looked(*answer, asked_s=asked_s, now_s=now_s)

    def _finish_retired(self) -> None:
        ray = self._engine.ray
        for slot, reference in list(self._retiring):
            done, _ = ray.wait([reference], timeout=0)
            if done:
                self._retiring.remove((slot, reference))
                self._end(slot, reference)

    def _stop_rank(self, slots: Sequence[Slot], grace_s: float) -> None:
        """Stop the actors that run; those Ray has yet to start are only called off."""
        ray = self._engine.ray
        stops = {slot.actor.stop.remote(grace_s): slot for slot in slots if slot.state == "running"}
        deadline, hurried, left = time.monotonic() + grace_s + KILL_WAIT_S, False, list(stops)
        while left and time.monotonic() < deadline:
            _, left = ray.wait(left, num_returns=len(left), timeout=0.1)
            if self._hurry.is_set() and not hurried:
                hurried = True
                for reference in left:
                    stops[reference].actor.hurry.remote()
        for reference, slot in stops.items():
            self._end(slot, None if reference in left else reference)
        for slot in slots:
            if slot not in stops.values():
                ray.kill(slot.actor, no_restart=True)

    def _end(self, slot: Slot, stopped: Any) -> None:
        """Take the actor away after its `stop`, whose answer tells how the process ended; without one it is killed as it is."""
        ray, reason = self._engine.ray, "killed"
        if stopped is not None:
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
                reason = ray.get(stopped)[0].last_exit
        ray.kill(slot.actor, no_restart=True)
        self._on_event(f"{slot.spec.name} ended ({reason})")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if "creation task" in lines[0] else lines[0])[:200] if lines else type(error).__name__
