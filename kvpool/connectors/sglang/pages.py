"""The pages of one of SGLang's host pools as values of the pool: names, memory, and what moves between the two.

A host pool says itself where the bytes of a page lie (`get_page_buffer_meta`): a few contiguous objects, K and V for instance, each of
which becomes a value and is read and written in place. Host pools that can't say so for their layout are read and written by whole pages,
with the copy that `get_data_page` and `set_from_flat_data_page` make.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvpool.client.arrays import Bytes
from kvpool.client.values import ValueClient
from kvpool.connectors.sglang import names
from kvpool.errors import ConfigError

log = logging.getLogger(__name__)


class Pages(Protocol):
    """The pages of one host pool. `keys` are SGLang's, `indices` the tokens' places in the host pool, `page_size` of them a page."""

    nbytes: int
    """Bytes of one page."""

    def names(self, key: str) -> list[bytes]:
        """The values that make up a page."""
        ...

    def read(self, client: ValueClient, keys: Sequence[str], indices: Any) -> list[bool]:
        """Fill the pages; which came whole. What others hold is unspecified."""
        ...

    def write(self, client: ValueClient, keys: Sequence[str], indices: Any, ttl_s: float) -> list[bool]:
        """Put the pages; which of them the pool has whole."""
        ...


class NoPages:
    """A host pool that only counts: it has no memory, its side pools carry the data. Every page is there."""

    nbytes = 0

    def names(self, key: str) -> list[bytes]:
        """None."""
        return []

    def read(self, client: ValueClient, keys: Sequence[str], indices: Any) -> list[bool]:
        """Nothing to do."""
        return [True] * len(keys)

    def write(self, client: ValueClient, keys: Sequence[str], indices: Any, ttl_s: float) -> list[bool]:
        """Nothing to do."""
        return [True] * len(keys)


class ObjectPages:
    """Pages in place: `factor` parts by heads, each of the same number of objects."""

    def __init__(self, pool: Any, prefixes: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.nbytes = sum(sizes)
        self._pool = pool
        self._objects = len(sizes)
        each = len(sizes) // len(prefixes)
        self._ends = [(prefix, b"\0%d" % i) for prefix in prefixes for i in range(each)]
        self._factor = len(prefixes)

    def names(self, key: str) -> list[bytes]:
        """The names of a page's objects, in the order of `get_page_buffer_meta`."""
        raw = key.encode()
        return [prefix + raw + end for prefix, end in self._ends]

    def read(self, client: ValueClient, keys: Sequence[str], indices: Any) -> list[bool]:
        """See `Pages`."""
        return self._whole(client.get([name for key in keys for name in self.names(key)], self._memory(len(keys), indices)))

    def write(self, client: ValueClient, keys: Sequence[str], indices: Any, ttl_s: float) -> list[bool]:
        """See `Pages`."""
        wanted = [name for key in keys for name in self.names(key)]
        return self._whole(client.put(wanted, self._memory(len(keys), indices), ttl_s=ttl_s))

    def _whole(self, done: Sequence[bool]) -> list[bool]:
        return [all(done[at : at + self._objects]) for at in range(0, len(done), self._objects)]

    def _memory(self, count: int, indices: Any) -> list[Bytes]:
        pointers, sizes = buffers_of(self._pool, indices, self._factor)
        if len(pointers) != count * self._objects:
            raise ConfigError(f"{count} pages of {self._objects} objects, but the host pool names {len(pointers)} buffers")
        return [at_address(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


class CopiedPages:
    """Whole pages, copied by the host pool."""

    def __init__(self, pool: Any, prefix: bytes) -> None:
        self.nbytes = _nbytes(pool.get_dummy_flat_data_page())
        self._pool = pool
        self._prefix = prefix
        self._page_size = page_size_of(pool)

    def names(self, key: str) -> list[bytes]:
        """The one name of a page."""
        return [self._prefix + key.encode() + b"\0" + names.WHOLE]

    def read(self, client: ValueClient, keys: Sequence[str], indices: Any) -> list[bool]:
        """See `Pages`."""
        pages = [self._pool.get_dummy_flat_data_page() for _ in keys]
        came = client.get([name for key in keys for name in self.names(key)], pages)
        for at, page, there in zip(self._starts(indices), pages, came, strict=True):
            if there:
                self._pool.set_from_flat_data_page(at, page)
        return came

    def write(self, client: ValueClient, keys: Sequence[str], indices: Any, ttl_s: float) -> list[bool]:
        """See `Pages`."""
        pages = [self._pool.get_data_page(at, flat=True).contiguous() for at in self._starts(indices)]
        return client.put([name for key in keys for name in self.names(key)], pages, ttl_s=ttl_s)

    def _starts(self, indices: Any) -> list[int]:
        return [int(at) for at in indices.tolist()[:: self._page_size]]


def pages_of(config: Any, name: str, pool: Any, first_page: Any, *, generation: int) -> Pages:
    """The pages of the host pool called `name`; `first_page` are the indices of its first page. `generation` is part of the names."""
    if name == names.ANCHOR and getattr(pool, "kv_buffer", pool) is None and not getattr(pool, "size_per_token", 1):
        return NoPages()
    factor = names.split_factor(config, name)
    parts = [f"{part} generation={generation}" for part in names.parts_of(config, name, pool)]
    try:
        sizes = [int(size) for size in buffers_of(pool, first_page, factor)[1]]
    except (ValueError, RuntimeError, AttributeError) as error:  # it says so by one of these
        if factor > 1:
            raise ConfigError(f"host pool {name} can't split the heads of its pages: {error}") from error
        log.info("host pool %s: whole pages are copied, because it has no buffers to name: %s", name, error)
        return CopiedPages(pool, names.prefix_of([*names.facts_of(config, name, pool, ()), *parts]))
    per_part = sizes[: len(sizes) // factor]
    facts = names.facts_of(config, name, pool, per_part)
    return ObjectPages(pool, [names.prefix_of([*facts, part]) for part in parts], sizes)


def buffers_of(pool: Any, indices: Any, factor: int) -> tuple[list[int], list[int]]:
    """Addresses and bytes of the objects of some pages, page by page, part by part."""
    if factor > 1:
        pointers, sizes = pool.get_split_heads_page_buffer_meta(indices, factor)
    else:
        pointers, sizes = pool.get_page_buffer_meta(indices)
    return pointers, sizes


def page_size_of(pool: Any) -> int:
    """How many indices make a page."""
    return int(getattr(pool, "page_size", 1) or 1)


def at_address(pointer: int, nbytes: int) -> Bytes:
    """Memory of this process as an array. It is the caller's that it stays."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)), np.uint8)


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
