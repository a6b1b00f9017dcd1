"""One worker as the router sees it: how to reach it, what it says about itself, and how busy it is kept.

A worker is one incarnation: restarted, it is another worker with a new connection, no load, no hints and little trust.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

import msgspec

from kvpool.block import KEY_BYTES, MAX_BLOCK_TOKENS, salted_root
from kvpool.engine.attention.settings import parse_attention
from kvpool.errors import ConfigError
from kvpool.policy.admission.trust import Trust
from kvpool.policy.routing import WorkerRef
from kvpool.request import DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, Scope, WorkerStatus

ROLES = ("prefill", "decode")
ADAPTERS = "adapters"
"""In a worker's info: its LoRA adapters, a JSON array of names."""


class WorkerPort(Protocol):
    """A connection to one worker (`kvpool.wire.worker_client.WorkerClient`). Times are in seconds; raises kvpool errors."""

    def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncIterator[PrefillEvent]:
        """`FirstToken`, then `Published`."""
        ...

    def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncIterator[DecodeEvent]:
        """`Started`, `TokenOut`..., `Finished`."""
        ...

    async def status(self, timeout_s: float) -> WorkerStatus:
        """The worker's account of itself."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        ...


class Said(NamedTuple):
    """What a worker says about itself in its member record.

    `fields`: its namespace's canonical bytes without a salt, b"" from one that doesn't say; `host`: on which machine, "" the same way;
    `slots`: requests it serves at once, `kv_tokens`: tokens it has KV memory for, `token_bytes`: KV of one, 0 from one that doesn't say;
    `attention`: what its answers are read with unless a request says, "" from one that knows of no techniques.
    """

    root: bytes
    block_tokens: int
    context_tokens: int
    fields: bytes
    host: str
    slots: int
    kv_tokens: int
    attention: str = ""
    token_bytes: int = 0

    @classmethod
    def of(cls, info: Mapping[str, str]) -> Self:
        """From a member's info. Raises `ConfigError` for one that a router can't use."""
        try:
            said = cls(
                root=bytes.fromhex(info["namespace"]),
                block_tokens=int(info["block_tokens"]),
                context_tokens=int(info["max_tokens"]),
                fields=bytes.fromhex(info.get("fields", "")),
                host=info.get("host", ""),
                slots=int(info.get("slots", "0")),
                kv_tokens=int(info.get("kv_tokens", "0")),
                attention=info.get("attention", ""),
                token_bytes=int(info.get("token_bytes", "0")),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(f"its info is unusable ({error!r})") from None
        if said.fields:
            salted_root(said.fields, b"")
        if said.attention:
            parse_attention(said.attention)
        in_range = len(said.root) == KEY_BYTES and 1 <= said.block_tokens <= MAX_BLOCK_TOKENS and said.context_tokens >= 1
        if not in_range or min(said.slots, said.kv_tokens, said.token_bytes) < 0:
            raise ConfigError(f"its info is out of range: {dict(info)}")
        return said


class Elsewhere(NamedTuple):
    """What the other routers keep a worker busy with, as they said lately."""

    active: int = 0
    queued: int = 0
    backlog_tokens: int = 0
    decode_tokens: int = 0


NOT_ELSEWHERE = Elsewhere()


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One incarnation of one worker, with this router's load on it: requests, those not yet answered, prompt tokens not yet through, KV."""

    ref: WorkerRef
    port: WorkerPort
    said: Said
    users: int = 0
    """Who must not lose the connection: requests being served, and questions for its status."""
    active: int = 0
    queued: int = 0
    backlog_tokens: int = 0
    decode_tokens: int = 0
    elsewhere: Elsewhere = NOT_ELSEWHERE
    trust: Trust = field(default_factory=Trust)
    listed: bool = True
    draining: bool = False
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it answers with if a request names one; they may come and go."""

    @property
    def name(self) -> str:
        """For messages: role and the first digits of the id."""
        return f"{self.ref.role} worker {self.ref.id[:8]}"

    @property
    def root(self) -> bytes:
        """Of the keys of its blocks, without a salt."""
        return self.said.root

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.said.block_tokens

    @property
    def context_tokens(self) -> int:
        """Prompt and answer tokens that one request may have."""
        return self.said.context_tokens

    @property
    def host(self) -> str:
        """Which machine it runs on, if it says."""
        return self.said.host

    @property
    def load(self) -> int:
        """Requests there, from all routers as far as is known."""
        return self.active + self.elsewhere.active

    def root_of(self, scope: Scope, adapter: str = "") -> bytes:
        """The root of the keys of `scope`'s blocks, computed with `adapter`, in this worker.

        Unknown to a worker that doesn't say how it makes them: one that nobody else has.
        """
        root = adapter_root(self.root, adapter) if adapter else self.root
        if not scope.salt:
            return root
        return salted_root(self.said.fields, scope.salt) if self.said.fields and not adapter else scoped_root(root, scope.salt)


def adapter_root(root: bytes, adapter: str) -> bytes:
    """The root of the keys of what is computed with the LoRA adapter `adapter` of a stock engine: nobody else has it."""
    return hashlib.sha256(root + b"\0adapter\0" + adapter.encode()).digest()


def adapters_in(info: Mapping[str, str]) -> frozenset[str]:
    """The LoRA adapters that a worker says it has. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(info.get(ADAPTERS, "[]"), type=frozenset[str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"what it says of its adapters can't be read: {error}") from None


def scoped_root(root: bytes, salt: bytes) -> bytes:
    """The root of the keys of a scope with `salt` in a worker that doesn't say how it makes them: one that nobody else has."""
    return hashlib.sha256(root + salt).digest()


class Place:
    """One request's share of a worker's load, from when it is entered until it is closed."""

    def __init__(self, worker: Worker, *, backlog_tokens: int, decode_tokens: int, sent: bool) -> None:
        """`sent`: the worker has the request, and hasn't begun to answer."""
        self._worker = worker
        self._backlog = backlog_tokens
        self._decode = decode_tokens
        self._sent = sent
        worker.active += 1
        worker.queued += sent
        worker.backlog_tokens += backlog_tokens
        worker.decode_tokens += decode_tokens

    def through(self) -> None:
        """The worker has computed the prompt: it works."""
        if self._sent:
            self._worker.trust.answered()
        self._settle()

    def grew(self) -> None:
        """One token more."""
        self._worker.decode_tokens += 1
        self._decode += 1

    def close(self) -> None:
        """The request is there no more."""
        self._settle()
        self._worker.active -= 1
        self._worker.decode_tokens -= self._decode
        self._decode = 0

    def _settle(self) -> None:
        self._worker.queued -= self._sent
        self._worker.backlog_tokens -= self._backlog
        self._sent, self._backlog = False, 0
