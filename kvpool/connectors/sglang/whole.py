"""Tensors under single keys, as SGLang's older interface hands them over: a value for the bytes, and one that says how they looked.

The second is of a fixed length, so that a tensor can be read by those who don't know its size: one line of JSON, filled up with spaces.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import torch

from kvpool.client.values import ValueClient
from kvpool.connectors.sglang import names
from kvpool.connectors.sglang.pages import at_address
from kvpool.errors import ConfigError

_FORM_BYTES: Final = 256
_MAX_BYTES: Final = 1 << 32
_DTYPES: Final = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class WholeTensors:
    """Tensors of one rank, under `prefix`."""

    def __init__(self, client: ValueClient, prefix: bytes, ttl_s: float) -> None:
        self._client = client
        self._prefix = prefix
        self._ttl_s = ttl_s

    def name(self, key: str) -> bytes:
        """The value that holds the bytes."""
        return self._prefix + key.encode() + b"\0" + names.WHOLE

    def put(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Keep tensors; for which of them the pool has one now. One that is there stays."""
        held = self._client.put([self.name(key) for key in keys], [_contiguous(one) for one in tensors], ttl_s=self._ttl_s)
        forms = [_form(one) for one in tensors]
        told = self._client.put([self._form_name(key) for key in keys], forms, ttl_s=self._ttl_s)
        return [there and told for there, told in zip(held, told, strict=True)]

    def get(self, keys: Sequence[str], targets: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Fill the targets; each target that was filled, a new tensor where there was none given, None where nothing came."""
        wanted: list[torch.Tensor | None] = list(targets)
        unknown = [i for i, target in enumerate(targets) if target is None]
        if unknown:
            forms = [bytearray(_FORM_BYTES) for _ in unknown]
            told = self._client.get([self._form_name(keys[i]) for i in unknown], forms)
            for i, form, there in zip(unknown, forms, told, strict=True):
                wanted[i] = _empty(bytes(form)) if there else None
        some = [i for i, target in enumerate(wanted) if target is not None]
        came = self._client.get([self.name(keys[i]) for i in some], [wanted[i] for i in some])
        found: list[torch.Tensor | None] = [None] * len(keys)
        for i, there in zip(some, came, strict=True):
            found[i] = wanted[i] if there else None
        return found

    def _form_name(self, key: str) -> bytes:
        return self._prefix + key.encode() + b"\0" + names.FORM


def as_tensor(given: Any, nbytes: Any) -> torch.Tensor:
    """A tensor as it is; an address with its number of bytes as a tensor of bytes over that memory. Raises `ConfigError`."""
    if isinstance(given, torch.Tensor):
        return given
    if type(given) is int and type(nbytes) is int and given > 0 and nbytes > 0:
        return torch.from_numpy(at_address(given, nbytes))
    raise ConfigError(f"a location is a tensor, or an address with its bytes in target_sizes; got {type(given).__name__} and {nbytes!r}")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().cpu()


def _form(tensor: torch.Tensor) -> bytes:
    text = json.dumps({"dtype": str(tensor.dtype), "shape": list(tensor.shape)}).encode()
    if len(text) > _FORM_BYTES or str(tensor.dtype) not in _DTYPES or not tensor.numel():
        raise ConfigError(f"tensors of {tensor.dtype} and {list(tensor.shape)} can't be kept")
    return text.ljust(_FORM_BYTES)


def _empty(form: bytes) -> torch.Tensor | None:
    """A new tensor of the form that was told; None for what no writer of ours says."""
    told = json.loads(form)
    dtype = _DTYPES.get(told["dtype"])
    if dtype is None:
        return None
    nbytes = dtype.itemsize
    for side in told["shape"]:
        nbytes *= side
    return torch.empty(told["shape"], dtype=dtype) if 0 < nbytes <= _MAX_BYTES else None
