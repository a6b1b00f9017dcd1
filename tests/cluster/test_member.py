"""Records of members: round trip, and refusal of everything else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cluster.member import MAX_RECORD_BYTES, MAX_REPORTS, Leased, Member, decode_record, encode_record
from kvpool.errors import ProtocolError

MEMBER = Member(role="node", id="0123456789abcdef" * 2, incarnation=7, address="127.0.0.1:7001", info={"url": "http://127.0.0.1:8000"})
RECORD = (
    '{"address":"127.0.0.1:7001","id":"0123456789abcdef0123456789abcdef","incarnation":7,'
    '"info":{"url":"http://127.0.0.1:8000"},"lease_ms":3000,"role":"node","v":1}'
)


def test_record_golden_text() -> None:
    """Processes of different versions meet in one store: the spelling of version 1 is fixed."""
    assert encode_record(Leased(MEMBER, 3000)) == RECORD
    assert decode_record(RECORD.encode()) == Leased(MEMBER, 3000)


@given(st.dictionaries(st.text(max_size=50), st.text(max_size=50), max_size=10))
def test_record_round_trip_keeps_any_info(info: dict[str, str]) -> None:
    """Info is free text."""
    try:
        for text in (*info, *info.values()):
            text.encode()
    except UnicodeEncodeError:
        return  # lone surrogates aren't text
    member = Member(role="decode", id="f" * 32, incarnation=1, address="[::1]:80", info=info)
    assert decode_record(encode_record(Leased(member, 500))) == Leased(member, 500)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"role": "king"},
        {"role": None},
        {"id": "x"},
        {"incarnation": 0},
        {"incarnation": True},
        {"incarnation": 1.5},
        {"incarnation": 2**53},
        {"address": "here"},
        {"address": "h:70000"},
        {"info": {"a": 1}},
        {"info": []},
        {"info": {"a": "x" * 9000}},
        {"lease_ms": 0},
        {"lease_ms": "3000"},
        {"info": {"a": "\ud800"}},
        {"reports": {}},
        {"reports": ["node"]},
        {"reports": [["node", "f"]]},
        {"reports": [["node", "f", "1"]]},
        {"reports": [["node", ["f"], 1]]},
        {"reports": [["node", "f", number] for number in range(MAX_REPORTS + 1)]},
    ],
)
def test_record_with_a_bad_field_is_refused(change: dict[str, object]) -> None:
    """A record is input like any other."""
    with pytest.raises(ProtocolError):
        decode_record(json.dumps({**json.loads(RECORD), **change}))


@pytest.mark.parametrize("record", [b"", b"\xff", b"[]", b"null", b"{}", b"[" * 5000, RECORD.encode()[:-1], b" " * (MAX_RECORD_BYTES + 1)])
def test_record_that_is_no_record_is_refused(record: bytes) -> None:
    """Truncated, huge, deeply nested or binary: one error, no crash."""
    with pytest.raises(ProtocolError):
        decode_record(record)
