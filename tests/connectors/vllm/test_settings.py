"""`kv_connector_extra_config`: what is wrong is said, with what to do."""

import re
from typing import Any

import pytest

from kvpool.connectors.vllm.settings import Settings, check_policy
from kvpool.errors import ConfigError


def test_pool_alone_is_enough() -> None:
    """One entry starts it; the rest has defaults."""
    assert Settings.parse({"pool": " 127.0.0.1:7000 "}) == Settings(pool="127.0.0.1:7000")
    assert Settings.parse({"pool": "redis://cache:6379/0", "load_s": 2, "load": "layers"}).load_s == 2.0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, 'say where the pool is, {"pool": "host:port"}'),
        ({"pool": 7000}, "say where the pool is"),
        ({"pool": "localhost"}, "names no port"),
        ({"pool": "a:1,b"}, "names no port"),
        ({"pool": "a:1", "pol": 1}, "'pol' is not known; what is: pool, transport"),
        ({"pool": "a:1", "load": "fast"}, "load is 'fast'; choose auto, sync, async, layers"),
        ({"pool": "a:1", "transport": "rdma"}, "transport is 'rdma'; choose auto"),
        ({"pool": "a:1", "load_s": 0}, "load_s is 0; write a number from 0.01 to 600"),
        ({"pool": "a:1", "load_s": True}, "load_s is True; write a number"),
        ({"pool": "a:1", "min_blocks": 1.5}, "min_blocks is 1.5; write a number from 1"),
        ({"pool": "a:1", "save_decode": "no"}, "save_decode is 'no'; write true or false"),
        ({"pool": "a:1", "salt": 5}, "salt is 5; write text"),
    ],
)
def test_wrong_entry_says_what_to_write(extra: dict[str, Any], said: str) -> None:
    """A typo must not be a default."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        Settings.parse(extra)


def test_policy_that_fails_requests_is_refused_unless_wanted() -> None:
    """vLLM's default would turn a block that has just left the pool into an error of the request."""
    with pytest.raises(ConfigError, match=r'"kv_load_failure_policy":"recompute"'):
        check_policy("fail", Settings(pool="a:1"))
    check_policy("recompute", Settings(pool="a:1"))
    check_policy("fail", Settings(pool="a:1", fail_on_lost_load=True))
