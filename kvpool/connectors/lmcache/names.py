"""What an object of LMCache is called in the pool.

An object's name is everything that makes equal chunks of tokens unequal bytes: LMCache's key (model, rank, object group, salt, hash of the
chunk) and the object's layout, its shapes and element types. The key alone doesn't say how many layers or which element type there are.

    sha256 over: for each of model, salt, layout, chunk hash   u32 little-endian length, bytes
                 rank u64, group u64                           little-endian

*Plain bytes* are a layout of their own: that of objects which something else has packed (LMCache's serde), so that their shape says nothing
about what is in them. A lookup is told the layouts of what a model computes, not of what becomes of it.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

PLAIN: Final = "bytes"
"""The layout of plain bytes."""
_U32, _NUMBERS = struct.Struct("<I"), struct.Struct("<QQ")


class Key(Protocol):
    """LMCache's `ObjectKey`, as far as it counts here."""

    @property
    def chunk_hash(self) -> bytes: ...  # noqa: D102

    @property
    def model_name(self) -> str: ...  # noqa: D102

    @property
    def kv_rank(self) -> int: ...  # noqa: D102

    @property
    def object_group_id(self) -> int: ...  # noqa: D102

    @property
    def cache_salt(self) -> str: ...  # noqa: D102


class Layout(Protocol):
    """LMCache's `MemoryLayoutDesc`."""

    @property
    def shapes(self) -> Sequence[Any]: ...  # noqa: D102

    @property
    def dtypes(self) -> Sequence[Any]: ...  # noqa: D102


def name_of(key: Key, layout: str) -> bytes:
    """The name of an object, 32 bytes."""
    digest = hashlib.sha256()
    for part in (key.model_name.encode(), key.cache_salt.encode(), layout.encode(), key.chunk_hash):
        digest.update(_U32.pack(len(part)) + part)
    digest.update(_NUMBERS.pack(key.kv_rank, key.object_group_id))
    return digest.digest()


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """A layout in words, such as `torch.bfloat16[2,30,256,192]`; `PLAIN` for one row of single bytes, or nothing known."""
    if not shapes or (len(shapes) == 1 and len(shapes[0]) == 1 and str(dtypes[0]).endswith("uint8")):
        return PLAIN
    return ";".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in zip(shapes, dtypes, strict=True))


def layouts_of(keys: Sequence[Key], layouts: Mapping[int, Layout]) -> list[str]:
    """The layout of each key's object, by the layouts of object groups that a lookup is told."""
    named = {group: layout_of(layout.shapes, layout.dtypes) for group, layout in layouts.items()}
    return [named.get(key.object_group_id, PLAIN) for key in keys]
