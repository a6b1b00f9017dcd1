"""How a cluster's membership is spelled in a Redis-compatible server, and the scripts that change it.

For a cluster NAME (all keys share one hash slot, so Redis Cluster serves them too)::

    {kvpool:NAME}:role:ROLE             sorted set: member id -> server time in ms at which its lease runs out
    {kvpool:NAME}:member:ROLE:ID        the member's JSON record, with the lease as expiry
    {kvpool:NAME}:incarnation:ROLE:ID   the highest incarnation handed out under this id; expires after 30 days of silence
    {kvpool:NAME}:config                what the cluster agrees on, as JSON with a version
    {kvpool:NAME}:birth                 random, written once after each emptying: tells watchers that the server forgot

The incarnation counter starts at the wall clock in milliseconds and grows by one a join, so a counter that was lost with its
server starts again above every value it ever gave. It is also the fence: a heartbeat of a lower incarnation is refused, so
a process that was paused while its successor joined can't put its stale address back.
"""

from dataclasses import dataclass

COUNTER_TTL_MS = 30 * 24 * 3600 * 1000
MAX_MEMBERS_PER_ROLE = 1024
"""A watcher reads at most so many ids of a role, the most recently renewed first."""

# KEYS: counter. ARGV: wall clock in ms, counter TTL in ms. Answers the next incarnation.
JOIN = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local incarnation = redis.call('INCR', KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return incarnation
"""

_STORED_VERSION = """
local function stored_version(key)
  local text = redis.call('GET', key)
  return text and tonumber(string.match(text, '"version":(%d+)')) or 0
end
"""

# KEYS: role set, record, counter, birth, config. ARGV: id, incarnation, record text, lease in ms, counter TTL in ms, birth token,
# version and text of the config last known. Answers 1, or 0 when a higher incarnation exists.
HEARTBEAT = f"""{_STORED_VERSION}
local newest = tonumber(redis.call('GET', KEYS[3]) or '0')
if newest > tonumber(ARGV[2]) then return 0 end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[5])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('ZADD', KEYS[1], now_ms + ARGV[4], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[4])
redis.call('SET', KEYS[4], ARGV[6], 'NX')
local version = tonumber(ARGV[7])
if version > 0 and stored_version(KEYS[5]) < version then redis.call('SET', KEYS[5], ARGV[8]) end
return 1
"""

# KEYS: role set, record, counter. ARGV: id, incarnation. Removes the record unless a higher incarnation wrote it.
LEAVE = """
local newest = tonumber(redis.call('GET', KEYS[3]) or '0')
if newest > tonumber(ARGV[2]) then return 0 end
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
"""

# KEYS: config. ARGV: the version this change was made from, the new text. Answers 1, or 0 when there is a later version.
CONFIGURE = f"""{_STORED_VERSION}
if stored_version(KEYS[1]) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names of cluster `name`."""

    name: str

    @property
    def birth(self) -> str:
        """The birth token."""
        return f"{{kvpool:{self.name}}}:birth"

    @property
    def config(self) -> str:
        """The cluster's config."""
        return f"{{kvpool:{self.name}}}:config"

    def role(self, role: str) -> str:
        """The sorted set of a role's ids."""
        return f"{{kvpool:{self.name}}}:role:{role}"

    def record(self, role: str, id: str) -> str:
        """A member's record."""
        return f"{{kvpool:{self.name}}}:member:{role}:{id}"

    def counter(self, role: str, id: str) -> str:
        """The incarnation counter of an id."""
        return f"{{kvpool:{self.name}}}:incarnation:{role}:{id}"
