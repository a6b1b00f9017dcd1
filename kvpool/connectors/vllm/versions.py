"""Which vLLM this connector was tested with, and whether that version's block hashes mean the same in every process."""

import re
from collections.abc import Mapping

from kvpool.errors import ConfigError

TESTED = ((0, 32), (0, 33))
"""From the first, up to and without the second."""
_SEEDED_ALIKE = (0, 31)
"""From here on the hash chain of a cryptographic hash begins at a constant; before, at random bytes of the process."""
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor of a version such as `0.32.0+cpu`. Raises `ConfigError`."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise ConfigError(f"vLLM says its version is {text!r}: {_want()}")
    return int(found[1]), int(found[2])


def check_version(text: str, *, untested: bool) -> None:
    """Raise `ConfigError` for a vLLM outside the tested range, unless `untested` ones are accepted."""
    if not untested and not TESTED[0] <= parse_version(text) < TESTED[1]:
        raise ConfigError(f'vLLM {text} is not one that this connector was tested with: {_want()}, or set "untested_vllm":true')


def hashes_are_shared(version: str, algorithm: str, environment: Mapping[str, str]) -> bool:
    """Whether equal tokens have equal block hashes in every process, and others have not, whoever chose them.

    If not, keys are made from tokens (`chains.py`).
    """
    if algorithm not in _CRYPTOGRAPHIC:
        return False
    return parse_version(version) >= _SEEDED_ALIKE or environment.get("PYTHONHASHSEED", "random") != "random"


def _want() -> str:
    (low, first), (high, last) = TESTED
    return f"install vllm >= {low}.{first}, < {high}.{last}"
