"""Stock vLLM's KV events as they are on the wire: one msgpack payload in, plain values out.

Seen of vLLM 0.16 to 0.32, SGLang 0.5.23 and what vLLM's main branch publishes:

* a batch is `[ts, [events], rank]`, or a map with the names `ts`, `events`, `data_parallel_rank`;
* an event is an array that begins with its name (0.16, 0.20) or a map with its name under `type`; fields at their defaults are left out,
  in an array only at its end;
* a hash is a number below 2^64 (the last 8 bytes of a digest, the default) or bytes (32 of them). Both may be in one stream for the same
  block, so a hash is read as its last 8 bytes.

Whatever else comes is no event of ours: `MalformedError` for a batch that can't be read, `Unknown` for an event of a kind or with fields
that are not understood. Lengths are checked before they are used; token ids are, by who makes keys of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvpool.block import MAX_BLOCK_TOKENS

MAX_EVENTS: Final = 1 << 16
"""Events in one batch."""
MAX_HASHES: Final = 1 << 17
"""Blocks in one event: a prompt of 2 Mi tokens in blocks of 16."""

_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx")
_STORED_LATER = ("kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id")
_FIELDS: Final = {
    "BlockStored": _STORED + _STORED_LATER,
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}

BlockHash = bytes
"""The last 8 bytes of an engine's name for a block."""


class MalformedError(ValueError):
    """A payload that is no batch of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """The engine has these consecutive blocks on `medium`. `tokens` (unchecked) is empty when it only says that known blocks are there too.

    `extra`: per block what else went into its hash, None for nothing; empty: for none of them, as far as the engine says.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: Sequence[int]
    block_size: int
    medium: str
    lora: str
    extra: tuple[Any, ...]
    group: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """They are not on `medium` any more."""

    hashes: tuple[BlockHash, ...]
    medium: str
    group: int


class Cleared:
    """The engine has no blocks any more."""


class Unknown:
    """An event of a kind, or with fields, that are not understood."""


Event = BlocksStored | BlocksRemoved | Cleared | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one message says. `ts`: when it was made, by the engine's clock, in seconds."""

    ts: float
    events: tuple[Event, ...]


def read_batch(payload: bytes) -> Batch:
    """Read one payload. Raises `MalformedError`."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MalformedError(f"not msgpack: {error}") from error
    if isinstance(raw, dict):
        raw = [raw.get("ts"), raw.get("events")]
    if not isinstance(raw, list) or len(raw) < 2:
        raise MalformedError("a batch is an array or a map of a time and events")
    ts, events = raw[0], raw[1]
    if not isinstance(ts, int | float) or isinstance(ts, bool) or not isinstance(events, list) or len(events) > MAX_EVENTS:
        raise MalformedError("a batch is a time and a list of at most 65,536 events")
    return Batch(ts=float(ts), events=tuple(_event(event) for event in events))


def _event(raw: Any) -> Event:
    fields = _fields(raw)
    if fields is None:
        return Unknown()
    kind, values = fields
    try:
        if kind == "BlockStored":
            return _stored(values)
        if kind == "BlockRemoved":
            return BlocksRemoved(hashes=_hashes(values["block_hashes"]), medium=_medium(values), group=_number(values, "group_idx", 0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return Unknown()
    return Cleared()


def _fields(raw: Any) -> tuple[str, dict[str, Any]] | None:
    """An event's kind and its fields by name, whether it is an array or a map. None for a kind that we don't know."""
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        names = _FIELDS.get(raw[0])
        return None if names is None or len(raw) - 1 > len(names) else (raw[0], dict(zip(names, raw[1:], strict=False)))
    if isinstance(raw, dict) and isinstance(kind := raw.get("type"), str) and kind in _FIELDS:
        return kind, raw
    return None


def _stored(values: dict[str, Any]) -> BlocksStored:
    hashes, tokens, parent = _hashes(values["block_hashes"]), values["token_ids"], values.get("parent_block_hash")
    extra, lora, size = values.get("extra_keys") or (), values.get("lora_name"), values["block_size"]
    if not isinstance(tokens, list) or not isinstance(extra, list | tuple) or (extra and len(extra) != len(hashes)):
        raise ValueError("fields of another shape")
    if not isinstance(size, int) or not 1 <= size <= MAX_BLOCK_TOKENS or (tokens and len(tokens) != size * len(hashes)):
        raise ValueError("not a whole number of blocks")
    if lora is None:
        lora = "" if values.get("lora_id") is None else f"lora_id {_number(values, 'lora_id', 0)}"
    elif not isinstance(lora, str):
        raise ValueError("not the name of an adapter")
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=size,
        medium=_medium(values),
        lora=lora,
        extra=tuple(extra),
        group=_number(values, "group_idx", 0),
        kind=_text(values, "kv_cache_spec_kind"),
    )


def _hashes(raw: Any) -> tuple[BlockHash, ...]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_HASHES:
        raise ValueError("not a list of hashes")
    return tuple(_hash(one) for one in raw)


def _hash(raw: Any) -> BlockHash:
    if type(raw) is int:
        return raw.to_bytes(8, "big")  # OverflowError for what is none
    if type(raw) is bytes and 8 <= len(raw) <= 64:
        return raw[-8:]
    raise ValueError("not a hash")


def _medium(values: dict[str, Any]) -> str:
    return _text(values, "medium") or "GPU"


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value or ""


def _number(values: dict[str, Any], name: str, default: int) -> int:
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise ValueError(f"{name} is no number")
    return value
