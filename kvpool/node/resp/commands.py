"""What each command does, for one connection: the subset of Redis that caches of values need, and what clients ask when they connect.

What isn't understood is refused by name, never passed over: a client that sets a value with an option which we don't have must not believe
that it worked.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvpool.block import BlockKey
from kvpool.errors import AccessError, KvpoolError, LimitError
from kvpool.node.resp import frames
from kvpool.node.resp import protocol as p
from kvpool.node.resp.store import Charge, Stored, ValueStore
from kvpool.security.principal import ANYBODY, Principal, Right
from kvpool.wire.auth import called_by

MAX_NAME_BYTES: Final = 1024
_MAX_TTL_MS: Final = 10 * 366 * 86_400_000
_SET_ENDS: Final[Mapping[Stored, bytes]] = {
    Stored.NO_SPACE: p.error("no room: the pool is full of what can't leave now, the tenant is at its quota, or the node drains", "OOM"),
    Stored.PINNED: p.error("an operator has pinned this value, so it can't be replaced"),
    Stored.BUSY: p.error("others remove this value all the time; try again", "TRYAGAIN"),
}


class Door(Protocol):
    """What all connections share."""

    store: ValueStore
    asks: bool
    """Whether callers must say who they are."""

    def known(self, token: str) -> Principal:
        """Whose token it is. Raises `AccessError`."""
        ...

    def salt(self, principal: Principal) -> bytes:
        """Of the principal's tenant. Raises `ConfigError`."""
        ...

    def admit(self, tenant: str) -> None:
        """One more call of a tenant. Raises `LimitError`."""
        ...

    def info(self, principal: Principal) -> str:
        """Lines of `name:value`."""
        ...


class Send(Protocol):
    """Where answers go, in order."""

    async def __call__(self, *answers: bytes | memoryview) -> None:
        """Send them; may wait for the client to take them."""
        ...


class Session:
    """One connection's commands: `await run(words)` for each."""

    def __init__(self, door: Door, send: Send, charge: Charge) -> None:
        self._door = door
        self._send = send
        self._charge = charge
        self._version = 2
        self._token: str | None = None
        self._principal: Principal | None = None if door.asks else ANYBODY
        self._salt = b""
        self.over = False
        """Whether the client has said goodbye."""

    @property
    def known(self) -> bool:
        """Whether it is known who asks."""
        return self._principal is not None

    async def run(self, words: Sequence[bytes]) -> None:
        """Do one command and answer it, if only with why not."""
        name, args = words[0].upper(), words[1:]
        command = _COMMANDS.get(name)
        try:
            if command is None:
                self.over = name in _OF_BROWSERS
                raise _Refused(f"unknown command {_shown(words[0])}; this server has {' '.join(sorted(_NAMES.values()))}")
            if not command.least <= len(args) <= command.most:
                raise _Refused(f"wrong number of arguments for {_NAMES[name]}")
            if command.rights is None:
                await command.run(self, args)
                return
            principal = self._checked()
            if not principal.may(*command.rights):
                raise _Refused(f"{principal.name} may not {_NAMES[name]}: it needs the right {' or '.join(command.rights)}", "NOPERM")
            if command.rights and principal.tenant is not None:
                self._door.admit(principal.tenant)
            with called_by(principal):
                await command.run(self, args)
        except _Refused as refused:
            await self._send(p.error(str(refused), refused.code))
        except AccessError as error:
            self._principal = None
            await self._send(p.error(str(error), "NOAUTH"))
        except LimitError as error:
            await self._send(p.error(str(error), "BUSY"))
        except KvpoolError as error:
            await self._send(p.error(str(error)))

    def _checked(self) -> Principal:
        """Who asks; a token that was revoked meanwhile counts no more."""
        if self._principal is None:
            raise _Refused("say who you are first: AUTH TOKEN, with a token made by `kvpool token new`", "NOAUTH")
        return self._principal if self._token is None else self._door.known(self._token)

    def _key(self, name: bytes) -> BlockKey:
        if len(name) > MAX_NAME_BYTES:
            raise _Refused(f"a key has at most {MAX_NAME_BYTES} bytes")
        return frames.key_of(name, self._salt)

    # Values

    async def _get(self, args: Sequence[bytes]) -> None:
        value = await self._door.store.get(self._key(args[0]), self._charge)
        await self._say(value)

    async def _mget(self, args: Sequence[bytes]) -> None:
        keys = list(map(self._key, args))
        await self._send(b"*%d\r\n" % len(keys))
        for key in keys:
            try:
                value = await self._door.store.get(key, self._charge)
            except KvpoolError:
                value = None  # an array can't take back what it has begun, and a miss is an answer
            await self._say(value)

    async def _set(self, args: Sequence[bytes]) -> None:
        ttl_ms, only_new = _set_options(args[2:])
        outcome = await self._door.store.put(self._key(args[0]), args[1], ttl_ms=ttl_ms, only_new=only_new)
        kept = p.nil(self._version) if outcome is Stored.EXISTS else p.OK
        await self._send(_SET_ENDS.get(outcome, kept))

    async def _exists(self, args: Sequence[bytes]) -> None:
        await self._send(p.number(self._door.store.exists(list(map(self._key, args)))))

    async def _delete(self, args: Sequence[bytes]) -> None:
        removed, pinned = await self._door.store.delete(list(map(self._key, args)))
        if pinned:
            raise _Refused(f"{removed} removed, {pinned} stay: an operator has pinned them")
        await self._send(p.number(removed))

    async def _say(self, value: memoryview | None) -> None:
        if value is None:
            await self._send(p.nil(self._version))
        else:
            await self._send(b"$%d\r\n" % len(value), value, p.CRLF)

    # Who and what

    async def _auth(self, args: Sequence[bytes]) -> None:
        self._authenticate(args)
        await self._send(p.OK)

    async def _hello(self, args: Sequence[bytes]) -> None:
        version, left = self._version, list(args)
        if left:
            if left[0] not in (b"2", b"3"):
                raise _Refused("unsupported protocol version; this server speaks 2 and 3", "NOPROTO")
            version = int(left.pop(0))
        while left:
            option = left.pop(0).upper()
            if option == b"AUTH" and len(left) >= 2:
                self._authenticate([left.pop(0), left.pop(0)])
            elif option == b"SETNAME" and left:
                left.pop(0)  # a name for lists of clients, which this server doesn't make
            else:
                raise _Refused(f"HELLO takes [2|3 [AUTH USER TOKEN] [SETNAME NAME]], not {_shown(option)}")
        if not self.known:
            raise _Refused("say who you are: HELLO 2 AUTH default TOKEN, or AUTH TOKEN first", "NOAUTH")
        self._version = version
        said = {"server": p.bulk(b"kvpool"), "version": p.bulk(b"1"), "proto": p.number(version), "mode": p.bulk(b"standalone")}
        await self._send(p.mapping({**said, "role": p.bulk(b"master"), "modules": p.EMPTY}, version))

    def _authenticate(self, args: Sequence[bytes]) -> None:
        """By a token, and if need be the name of whom it stands for."""
        if not self._door.asks:
            raise _Refused("this node asks nobody who they are; connect without a password")
        try:
            token = args[-1].decode("ascii", "replace")
            principal = self._door.known(token)
            if len(args) > 1 and args[0] not in (b"default", principal.name.encode()):
                raise AccessError("the token stands for another name; leave the name out, or give 'default'")
        except AccessError as error:
            raise _Refused(str(error), "WRONGPASS") from None
        self._salt = self._door.salt(principal)
        self._token, self._principal = token, principal

    async def _ping(self, args: Sequence[bytes]) -> None:
        await self._send(p.bulk(args[0]) if args else b"+PONG\r\n")

    async def _info(self, args: Sequence[bytes]) -> None:
        await self._send(p.bulk(self._door.info(self._checked()).encode()))

    async def _select(self, args: Sequence[bytes]) -> None:
        if args[0] != b"0":
            raise _Refused("there is one database, 0")
        await self._send(p.OK)

    async def _client(self, args: Sequence[bytes]) -> None:
        if args[0].upper() not in (b"SETINFO", b"SETNAME"):
            raise _Refused(f"CLIENT has SETINFO and SETNAME here, not {_shown(args[0])}")
        await self._send(p.OK)

    async def _config(self, args: Sequence[bytes]) -> None:
        if args[0].upper() != b"GET":
            raise _Refused("CONFIG has only GET here; a node is set up by its flags")
        known = {b"save": b"", b"appendonly": b"no"}
        await self._send(p.mapping({name.decode(): p.bulk(known[name]) for name in args[1:] if name in known}, self._version))

    async def _command(self, args: Sequence[bytes]) -> None:
        await self._send(p.EMPTY)

    async def _quit(self, args: Sequence[bytes]) -> None:
        self.over = True
        await self._send(p.OK)


class _Refused(Exception):
    """A command that isn't done, and why."""

    def __init__(self, why: str, code: str = "ERR") -> None:
        super().__init__(why)
        self.code = code


class _Command(NamedTuple):
    """`rights`: any one is enough, none named: whoever is known; None: everybody."""

    run: Callable[[Session, Sequence[bytes]], Awaitable[None]]
    least: int
    most: int
    rights: tuple[Right, ...] | None = ()


_R, _W = (Right.READ, Right.WORKER), (Right.WRITE, Right.WORKER)
_ANY: Final = 1 << 20
_COMMANDS: Final[Mapping[bytes, _Command]] = {
    b"GET": _Command(Session._get, 1, 1, _R),
    b"MGET": _Command(Session._mget, 1, _ANY, _R),
    b"EXISTS": _Command(Session._exists, 1, _ANY, _R),
    b"SET": _Command(Session._set, 2, 8, _W),
    b"DEL": _Command(Session._delete, 1, _ANY, _W),
    b"UNLINK": _Command(Session._delete, 1, _ANY, _W),
    b"PING": _Command(Session._ping, 0, 1),
    b"INFO": _Command(Session._info, 0, _ANY),
    b"SELECT": _Command(Session._select, 1, 1),
    b"CLIENT": _Command(Session._client, 1, _ANY),
    b"CONFIG": _Command(Session._config, 2, _ANY),
    b"COMMAND": _Command(Session._command, 0, _ANY),
    b"AUTH": _Command(Session._auth, 1, 2, None),
    b"HELLO": _Command(Session._hello, 0, 8, None),
    b"QUIT": _Command(Session._quit, 0, _ANY, None),
}
_OF_BROWSERS: Final = (b"POST", b"HOST:")
"""Words of HTTP: a web page that makes its reader's browser send commands here gets no further."""
_NAMES: Final = {name: name.decode() for name in _COMMANDS}


def _set_options(options: Sequence[bytes]) -> tuple[int, bool]:
    """(ttl in ms, whether only a new value) of what stands behind SET's value."""
    ttl_ms, only_new, left = 0, False, list(options)
    while left:
        option = left.pop(0).upper()
        if option == b"NX" and not only_new:
            only_new = True
        elif option in (b"EX", b"PX") and left and not ttl_ms:
            digits = left.pop(0)
            ttl_ms = int(digits) * (1000 if option == b"EX" else 1) if digits.isdigit() and len(digits) < 16 else 0
            if not 0 < ttl_ms <= _MAX_TTL_MS:
                raise _Refused("invalid expire time in SET; it is more than 0 and at most ten years")
        else:
            raise _Refused(f"SET takes [NX] [EX SECONDS | PX MILLISECONDS], not {_shown(option)}")
    return ttl_ms, only_new


def _shown(raw: bytes) -> str:
    return ascii(raw[:32].decode("latin-1"))
