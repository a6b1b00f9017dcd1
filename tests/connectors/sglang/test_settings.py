"""The extra config, checked."""

from typing import Any

import pytest

from kvpool.connectors.sglang.settings import Settings
from kvpool.errors import ConfigError

SGLANGS = {"backend_name": "kvpool", "module_path": "m", "class_name": "c", "file_storage_path": "/x"}


def test_settings_are_read_beside_sglangs_own() -> None:
    """SGLang leaves its entries in the mapping."""
    assert Settings.parse({**SGLANGS, "pool": " h:1,i:2 ".strip()}) == Settings(pool="h:1,i:2")
    found = Settings.parse({**SGLANGS, "pool": "redis://h/0", "interface_v1": 1, "timeout_s": 2, "transport": "tcp", "scope": "r2"})
    assert found == Settings(pool="redis://h/0", interface_v1=True, timeout_s=2, transport="tcp", scope="r2")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (None, "where the pool is"),
        ({"pool": " "}, "where the pool is"),
        ({"pool": "h:1", "poool": 1}, "'poool' is not known"),
        ({"pool": "h:1", "transport": "rdma"}, "choose auto, shm"),
        ({"pool": "h:1", "timeout_s": 0}, "timeout_s is 0"),
        ({"pool": "h:1", "timeout_s": True}, "timeout_s is True"),
        ({"pool": "h:1", "ttl_s": -1}, "ttl_s is -1"),
        ({"pool": "h:1", "scope": 7}, "scope is 7"),
    ],
)
def test_wrong_settings_say_what_to_do(extra: Any, says: str) -> None:
    """An engine that starts with a typo caches nothing, and nobody notices."""
    with pytest.raises(ConfigError, match=says):
        Settings.parse(extra)
