"""One process of the cluster, as the others see it, and the record that carries it through a membership store.

A member's identity is (role, id, incarnation): the id is a UUID that a restarted process may keep, the incarnation grows
with every join under that id. The address says where to reach it now and is never an identity.

A record is JSON with a version field; beside the member it has the lease, and whom this member reports as out of its reach
(`kvpool/cluster/quarantine.py`). Whatever a store returns is checked like any other input: a record that breaks a
rule here is an error for its reader to count and skip, never a half-filled member.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.errors import ConfigError, ProtocolError

ROLES = ("node", "prefill", "decode", "router")
MAX_INFO_BYTES = 8192
"""Limit on the sum of the UTF-8 lengths of all keys and values of `Member.info`."""
MAX_REPORTS = 64
"""Of how many others a member may report that it can't reach them."""
MAX_RECORD_BYTES = 6 * MAX_INFO_BYTES + 100 * MAX_REPORTS + 2048
"""JSON spells a control character with six."""
MAX_ADDRESS_BYTES = 255
MAX_INCARNATION = 2**53
"""Incarnations stay exact in every JSON reader and in Lua."""
MIN_LEASE_MS = 50
MAX_LEASE_MS = 600_000
RECORD_VERSION = 1

Identity = tuple[str, str, int]
"""Role, id and incarnation: one life of one process."""

_ID = re.compile(r"^[0-9a-f]{32}$")
_ADDRESS = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A live process: its role, who it is, where it listens, and what it says about itself.

    `id` is a UUID as 32 lowercase hex digits, `address` is `host:port` (port 1..65535), `info` is small text (8 KiB in all).
    Raises `ConfigError` when a rule is broken.
    """

    role: str
    id: str
    incarnation: int
    address: str
    info: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if not _ID.match(self.id):
            raise ConfigError(f"a member id is a UUID as 32 lowercase hex digits (uuid.uuid4().hex), got {self.id!r}")
        if not 1 <= self.incarnation < MAX_INCARNATION:
            raise ConfigError(f"incarnation must be between 1 and 2**53, got {self.incarnation}")
        match = _ADDRESS.match(self.address)
        if match is None or not 1 <= int(match.group(2)) <= 65535 or len(self.address) > MAX_ADDRESS_BYTES:
            raise ConfigError(f"a member's address is host:port, got {self.address!r}")
        size = sum(len(k.encode()) + len(v.encode()) for k, v in self.info.items())
        if size > MAX_INFO_BYTES:
            raise ConfigError(f"a member's info holds at most {MAX_INFO_BYTES} bytes, got {size}; publish a reference instead")

    @property
    def identity(self) -> Identity:
        """Role, id and incarnation."""
        return self.role, self.id, self.incarnation


class Leased(NamedTuple):
    """A member, how long its lease lasts in milliseconds, and whom it reports as out of its reach."""

    member: Member
    lease_ms: int
    reports: frozenset[Identity] = frozenset()


def encode_record(leased: Leased) -> str:
    """The JSON text under which a store keeps a member."""
    member = leased.member
    fields: dict[str, Any] = {"v": RECORD_VERSION, "lease_ms": leased.lease_ms, "address": member.address, "info": member.info}
    fields |= {"role": member.role, "id": member.id, "incarnation": member.incarnation}
    if leased.reports:
        fields["reports"] = sorted(leased.reports)
    return json.dumps(fields, separators=(",", ":"), sort_keys=True)


def decode_record(record: bytes | str) -> Leased:
    """What `record` says. Raises `ProtocolError` for anything but a well-formed record."""
    if len(record) > MAX_RECORD_BYTES:
        raise ProtocolError(f"a membership record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}")
    try:
        fields: Any = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a membership record is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("v") != RECORD_VERSION:
        raise ProtocolError(f"a membership record is not of version {RECORD_VERSION}")
    texts = [fields.get(name) for name in ("role", "id", "address")]
    numbers = [fields.get(name) for name in ("incarnation", "lease_ms")]
    info = fields.get("info")
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise ProtocolError("a membership record lacks a field or has one of the wrong type")
    if not isinstance(info, dict) or not all(isinstance(value, str) for value in info.values()):
        raise ProtocolError("the info of a membership record must map text to text")
    if not MIN_LEASE_MS <= fields["lease_ms"] <= MAX_LEASE_MS:
        raise ProtocolError(f"a membership record's lease must last {MIN_LEASE_MS}..{MAX_LEASE_MS} ms, got {fields['lease_ms']}")
    try:
        member = Member(role=fields["role"], id=fields["id"], incarnation=fields["incarnation"], address=fields["address"], info=info)
    except (ConfigError, UnicodeEncodeError) as error:
        raise ProtocolError(f"a membership record breaks a rule: {error}") from error
    return Leased(member, int(fields["lease_ms"]), _decode_reports(fields.get("reports", [])))


def _decode_reports(found: Any) -> frozenset[Identity]:
    if not isinstance(found, list) or len(found) > MAX_REPORTS:
        raise ProtocolError(f"the reports of a membership record must be a list of at most {MAX_REPORTS}")
    for each in found:
        if not isinstance(each, list) or len(each) != 3 or not all(isinstance(text, str) for text in each[:2]) or type(each[2]) is not int:
            raise ProtocolError("a report in a membership record must be a role, an id and an incarnation")
    return frozenset((role, id, incarnation) for role, id, incarnation in found)
