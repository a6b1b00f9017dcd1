"""An engine that publishes KV events as stock vLLM does, in this process: with both encodings, both kinds of hashes, replay, and faults.

It holds nothing and computes nothing; a test says what it stores and removes, and what goes wrong on the way.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

_END = b"\xff" * 8
_ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx")


def stored(
    tokens: Sequence[Any],
    block_size: int,
    *,
    first: int = 0,
    as_bytes: bool = False,
    medium: str = "GPU",
    told: bool = True,
    salt: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """The event for the full blocks of `tokens` from block `first` on; without `told` their tokens are left out, as of a connector's."""
    names = names_of(tokens, block_size, as_bytes=as_bytes, salt=salt)
    return {
        "type": "BlockStored",
        "block_hashes": names[first:],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": list(tokens[first * block_size : len(names) * block_size]) if told else [],
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **fields,
    }


def removed(names: Sequence[int | bytes], *, medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    """The event for blocks that went."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium, **fields}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def names_of(tokens: Sequence[Any], block_size: int, *, as_bytes: bool = False, salt: str = "") -> list[int | bytes]:
    """The engine's own names for the full blocks of `tokens`."""
    name, names = salt.encode(), []
    for at in range(0, len(tokens) // block_size * block_size, block_size):
        name = hashlib.sha256(name + repr(list(tokens[at : at + block_size])).encode()).digest()
        names.append(name)
    return [one if as_bytes else int.from_bytes(one[-8:], "big") for one in names]


def as_array(event: dict[str, Any]) -> list[Any]:
    """The event as vLLM 0.16 and 0.20 spell it."""
    order = _ORDER if event["type"] == "BlockStored" else ("block_hashes", "medium", "group_idx")
    values = [event.get(name) for name in order]
    while values and values[-1] is None and event["type"] != "BlockStored":
        values.pop()
    return [event["type"], *values]


class StockEngine:
    """One engine at addresses of its own, which it keeps over restarts. `buffer`: messages it can replay."""

    def __init__(self, *, buffer: int = 10_000, arrays: bool = False, topic: bytes = b"", replay_topic: bool = False) -> None:
        self._context = zmq.asyncio.Context.instance()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._arrays = arrays
        self._topic = topic
        self._replay_topic = replay_topic
        self._sequence = 0
        self._ts = 1000.0
        self._pub: Any = None
        self._router: Any = None
        self._task: asyncio.Task[None] | None = None
        self.asked: list[int] = []
        """From which number on replays were asked for."""
        self.endpoint = self.replay_endpoint = ""

    async def start(self) -> None:
        """Publish and replay from now on, where it did before."""
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.setsockopt(zmq.SNDHWM, 256)
        self.endpoint = await _bind(self._pub, self.endpoint)
        self.replay_endpoint = await _bind(self._router, self.replay_endpoint)
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """As if the process had ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._pub, self._router):
            socket.close(linger=0)

    async def restart(self) -> None:
        """Another life at the same addresses: it numbers from 0 and remembers nothing."""
        await self.stop()
        self.begin_anew()
        await self.start()

    def begin_anew(self) -> None:
        """Forget all, and number from 0."""
        self._sequence = 0
        self._buffer.clear()

    def pack(self, *events: Any) -> bytes:
        """A batch, made a moment after the one before."""
        self._ts += 0.001
        spelled = [as_array(event) if self._arrays and isinstance(event, dict) else event for event in events]
        return msgspec.msgpack.encode([self._ts, spelled, 0])

    async def say(self, *events: Any, lost: bool = False, times: int = 1, payload: bytes | None = None) -> tuple[int, bytes]:
        """Publish one message; `lost` on the way, or delivered several `times`. Its number and payload."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if payload is None:
            payload = self.pack(*events)
        self._buffer.append((sequence, payload))
        for _ in range(0 if lost else times):
            await self.send(sequence, payload)
        return sequence, payload

    def say_at_once(self, *events: Any) -> None:
        """Publish one message without giving anybody else a turn. What doesn't fit into the sockets is lost on the way."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        payload = self.pack(*events)
        self._buffer.append((sequence, payload))
        if self._pub.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            zmq.Socket.shadow(self._pub).send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    async def send(self, sequence: int, payload: bytes) -> None:
        """Put a message on the line, whatever it is."""
        await self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    async def _serve(self) -> None:
        while True:
            who, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            middle = [self._topic] if self._replay_topic else []
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    await self._router.send_multipart([who, b"", *middle, sequence.to_bytes(8, "big"), payload])
            await self._router.send_multipart([who, b"", *middle, _END, b""])


async def _bind(socket: Any, endpoint: str) -> str:
    """Bind where it was before, as soon as that is free again, or anywhere on this host."""
    for _ in range(200):
        try:
            socket.bind(endpoint or "tcp://127.0.0.1:*")
            return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode())
        except zmq.ZMQError:
            await asyncio.sleep(0.02)
    raise TimeoutError(f"{endpoint} is not free again")
