"""What Ray is asked for: one group of bundles per role, and what it does with them. Pure.

| role | strategy | why |
|---|---|---|
| node | `STRICT_SPREAD` | one per host: memory is the host's, and a dead host costs one node |
| prefill, decode | `SPREAD` | the compute is shared out, and a dead host doesn't take a whole group |
| router | `HERE` | beside whoever started the cluster if there is room, so that its URL is known |

On one host there is nothing to spread over; then there is one pool node and all groups are packed.
A worker group reserves what `floor` says; workers above come and go without a reservation, so that idle room is Ray's to give away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvpool.cli.procs import ProcessSpec
from kvpool.errors import ConfigError

STRICT_SPREAD, SPREAD, PACK = "STRICT_SPREAD", "SPREAD", "PACK"
HERE = "HERE"
"""No placement group: on the host of `kvpool up` if there is room, anywhere else if not."""
SCALED_ROLES = ("prefill", "decode")
CPUS_EACH = 1.0
_ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`bundles` equal reservations for one role; each holds `CPUS_EACH` CPUs and `memory_bytes` of memory."""

    role: str
    strategy: str
    bundles: int
    memory_bytes: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """One reservation in Ray's words."""
        return {"CPU": CPUS_EACH, **({"memory": float(self.memory_bytes)} if self.memory_bytes else {})}


def plan_groups(
    specs: Sequence[ProcessSpec], *, one_host: bool, node_bytes: int, floor: Mapping[str, int] | None = None
) -> tuple[Group, ...]:
    """The groups for `specs`, by role in order of appearance; `floor` bounds the reservations of a role (default: all of it).

    `node_bytes` is the memory of each pool node. Raises `ConfigError` for more pool nodes than one on one host.
    """
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.role] = counts.get(spec.role, 0) + 1
    if one_host and counts.get("node", 0) > 1:
        raise ConfigError(f"Ray places one pool node per host and --ray local has one host; got --nodes {counts['node']}")
    groups = []
    for role, count in counts.items():
        bundles = min(count, (floor or {}).get(role, count))
        memory = node_bytes if role == "node" else 0
        groups.append(Group(role=role, strategy=_strategy(role, one_host), bundles=bundles, memory_bytes=memory))
    return tuple(groups)


def needed(groups: Sequence[Group], most: Mapping[str, int]) -> tuple[int, int]:
    """(CPUs, bytes of memory) that `groups` take when the roles of `most` have grown to so many workers."""
    counts = {group.role: max(group.bundles, most.get(group.role, 0)) for group in groups}
    cpus = sum(count * CPUS_EACH for count in counts.values())
    return int(-(-cpus // 1)), sum(counts[group.role] * group.memory_bytes for group in groups)


def located(spec: ProcessSpec, *, python: str, host: str) -> ProcessSpec:
    """`spec` as it is started on `host` (an IP address) by that host's interpreter `python`."""
    words = [python, *spec.argv[1:]]
    for at, word in enumerate(words[:-1]):
        if word == "--listen" and words[at + 1] == _ANY_PORT:
            words[at + 1] = f"{host}:0"
        elif word == "--host":
            words[at + 1] = host
    return replace(spec, argv=tuple(words))


def _strategy(role: str, one_host: bool) -> str:
    if role == "node":
        return PACK if one_host else STRICT_SPREAD
    if role in SCALED_ROLES:
        return PACK if one_host else SPREAD
    return HERE
