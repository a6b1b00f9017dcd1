"""Messages of real engines, as they were on the line."""

import json
from pathlib import Path
from typing import Any

import pytest

CAPTURED = Path(__file__).parents[4] / "shared" / "engines" / "events"


def captured() -> list[dict[str, Any]]:
    if not CAPTURED.is_dir():
        pytest.skip(f"no captured events at {CAPTURED}")
    return [json.loads(line) for path in sorted(CAPTURED.glob("*.jsonl")) for line in path.read_text().splitlines()]


def revived(value: Any) -> Any:
    """What was captured, with the bytes that JSON can't hold."""
    if isinstance(value, str) and value.startswith("bytes:"):
        return bytes.fromhex(value[6:])
    if isinstance(value, list):
        return [revived(one) for one in value]
    return {name: revived(one) for name, one in value.items()} if isinstance(value, dict) else value
