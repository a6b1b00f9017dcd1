"""Which vLLM, and whether its block hashes are the same everywhere."""

import pytest

from kvpool.connectors.vllm.versions import check_version, hashes_are_shared
from kvpool.errors import ConfigError


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "unknown"])
def test_untested_version_is_refused_unless_accepted(version: str) -> None:
    """What wasn't tested may misread a layout; whoever knows better says so."""
    with pytest.raises(ConfigError, match=r"install vllm >= 0\.32, < 0\.33"):
        check_version(version, untested=False)
    check_version(version, untested=True)
    check_version("0.32.0+cpu", untested=False)


@pytest.mark.parametrize(
    ("version", "algorithm", "seed", "shared"),
    [
        ("0.32.0", "sha256", None, True),
        ("0.32.1+cu130", "sha256_cbor", None, True),
        ("0.32.0", "xxhash", "0", False),
        ("0.28.0", "sha256", None, False),
        ("0.28.0", "sha256", "random", False),
        ("0.28.0", "sha256", "0", True),
    ],
)
def test_hashes_are_used_only_where_they_are_shared_and_safe(version: str, algorithm: str, seed: str | None, shared: bool) -> None:
    """Older versions begin at random bytes without a seed, and a hash that isn't cryptographic can be made to collide."""
    assert hashes_are_shared(version, algorithm, {} if seed is None else {"PYTHONHASHSEED": seed}) is shared
