"""What the admin commands share: which nodes, which blocks, and asking them all at once.

Any node may hold any copy (a quick one, a replica, one from before the cluster grew), so every node is asked about every key, and
those that hold nothing say so. A node that doesn't answer, or only some of the batches, is part of the answer, not its end.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvpool.block import KEY_BYTES, chain_keys
from kvpool.cli.credentials import security
from kvpool.cli.lookup import choose_model, tokenize
from kvpool.cli.prefix import Span
from kvpool.cli.snapshot import MAX_ASKED_AT_ONCE, open_cluster
from kvpool.cli.state import find_cluster
from kvpool.cluster import Member
from kvpool.errors import ConfigError, KvpoolError, ProtocolError, UnavailableError
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity

T = TypeVar("T")

LOOK_TIMEOUT_S = 5.0
"""For calls that only read what a node has in mind."""
CHANGE_TIMEOUT_S = 30.0
"""For calls that may wait for a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Blocks to act on. `spans`: the tokens of the text that each holds, None where only a key was given. `model`: of the text."""

    keys: tuple[bytes, ...]
    spans: tuple[Span | None, ...]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Answers(Generic[T]):
    """By node id: what each node that answered said, and why others didn't. A node may be in both: it stopped half way."""

    values: dict[str, T] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def open_members(cluster: str | None) -> tuple[Member, ...]:
    """Everybody in the cluster at a URL, or in the local one. Raises `ConfigError`, `UnavailableError`."""
    with open_cluster(find_cluster(cluster)) as membership:
        return membership.members()


def choose_nodes(members: Sequence[Member], prefix: str | None) -> list[Member]:
    """The pool nodes, by id, or the one whose id starts with `prefix`. Raises `ConfigError`, `UnavailableError`."""
    nodes = sorted((member for member in members if member.role == "node"), key=lambda member: member.id)
    if not nodes:
        raise UnavailableError("no pool node has joined the cluster")
    if prefix is None:
        return nodes
    matching = [member for member in nodes if member.id.startswith(prefix.lower())]
    if not prefix or len(matching) != 1:
        found = f"{len(matching)} nodes have" if matching else "no node has"
        raise ConfigError(f"{found} an id that starts with {prefix!r}; `kvpool nodes` lists them")
    return matching


def choose_keys(members: Sequence[Member], keys: Sequence[str], text: str | None, model: str | None, *, chat: bool) -> Chosen:
    """The blocks that a command was given: keys in hex, or all blocks of a text, the partial last one included.

    Raises `ConfigError` for neither, both, or what isn't a key; `UnavailableError` when nobody can tokenise.
    """
    if bool(keys) == (text is not None):
        raise ConfigError("give either keys (64 hex digits each) or --prefix TEXT")
    if text is None:
        if chat or model is not None:
            raise ConfigError("--chat and --model say what to do with a text; give one with --prefix TEXT")
        wanted = tuple(dict.fromkeys(map(_parse_key, keys)))
        return Chosen(keys=wanted, spans=(None,) * len(wanted))
    text = sys.stdin.read() if text == "-" else text
    name, root, block_tokens = choose_model(members, model)
    tokens = tokenize(members, name, text, chat=chat)
    chain = tuple(chain_keys(root, tokens, block_tokens, tail=True))
    spans = tuple((at * block_tokens, min(len(tokens), (at + 1) * block_tokens)) for at in range(len(chain)))
    return Chosen(keys=chain, spans=spans, model=name)


async def ask_nodes(nodes: Sequence[Member], ask: Callable[[Member, AdminRpc], Awaitable[T]]) -> Answers[T]:
    """Ask all `nodes` at the same time, `MAX_ASKED_AT_ONCE` at most; `ask` bounds its own calls."""
    gate = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
    answers: Answers[T] = Answers()

    async def one(node: Member) -> None:
        async with gate:
            try:
                rpc = AdminRpc(node.address, _identity(node), security())
                try:
                    answers.values[node.id] = await ask(node, rpc)
                finally:
                    await rpc.close()
            except KvpoolError as error:
                answers.errors[node.id] = str(error)

    await asyncio.gather(*(one(node) for node in nodes))
    return Answers(dict(sorted(answers.values.items())), dict(sorted(answers.errors.items())))


async def ask_about_keys(
    nodes: Sequence[Member], keys: Sequence[bytes], limit: int, ask: Callable[[AdminRpc, Sequence[bytes]], Awaitable[Sequence[T]]]
) -> Answers[list[T]]:
    """Ask all `nodes` about all `keys`, `limit` in a call: one item a key. The list of a node that stopped half way is shorter."""
    said: dict[str, list[T]] = {node.id: [] for node in nodes}

    async def one(node: Member, rpc: AdminRpc) -> list[T]:
        for at in range(0, len(keys), limit):
            said[node.id].extend(await ask(rpc, keys[at : at + limit]))
        return said[node.id]

    answers = await ask_nodes(nodes, one)
    return Answers({node: items for node, items in sorted(said.items()) if items or node not in answers.errors}, answers.errors)


def finish(errors: Mapping[str, str], *, wrong: bool = False) -> None:
    """End the command: with 3 when something is known to be `wrong`, else with 2 when a node did not answer, else go on to 0."""
    if wrong:
        raise SystemExit(3)
    if errors:
        raise SystemExit(2)


def key_json(chosen: Chosen, index: int) -> dict[str, Any]:
    """A block for programs: its key in hex, and the tokens of the text that it holds."""
    span = chosen.spans[index]
    return {"key": chosen.keys[index].hex(), "tokens": list(span) if span else None}


def block_name(chosen: Chosen, index: int) -> str:
    """A block for people: the tokens it holds when they are known, and the start of its key."""
    span = chosen.spans[index]
    return (f"{span[0]}-{span[1]} " if span else "") + chosen.keys[index].hex()[:16]


def _parse_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"not a key: {text!r}; a key is {2 * KEY_BYTES} hex digits, as `kvpool inspect --prefix TEXT --json` prints them")
    return key


def _identity(node: Member) -> NodeIdentity:
    """Which life of the node is meant. Raises `ProtocolError` when the node doesn't say."""
    try:
        return NodeIdentity(node.id, int(node.info["incarnation"]))
    except (KeyError, ValueError) as error:
        raise ProtocolError("the node doesn't publish its incarnation, so it can't be told what to do; is it another version?") from error
