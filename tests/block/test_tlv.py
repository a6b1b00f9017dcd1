"""Tag-length-value lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block.tlv import iter_tlvs, pack_tlvs
from kvpool.errors import ConfigError, FrameError


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.binary(max_size=40)), max_size=8))
def test_tlvs_any_list_round_trips(items: list[tuple[int, bytes]]) -> None:
    """What was written is read, in order."""
    assert list(iter_tlvs(pack_tlvs(items))) == items


@pytest.mark.parametrize("cut", range(1, 9))
def test_tlvs_cut_raises(cut: int) -> None:
    """A length is compared with what is left before the value is touched."""
    data = pack_tlvs([(1, b"abc"), (2, b"defgh")])
    with pytest.raises(FrameError):
        list(iter_tlvs(data[:-cut]))


def test_tlvs_length_beyond_the_end_raises() -> None:
    """A hostile length gets an error, not memory."""
    with pytest.raises(FrameError, match="says 65535 bytes, only 2"):
        list(iter_tlvs(b"\x01\x00\xff\xff\x00\x00"))


@pytest.mark.parametrize("item", [(-1, b""), (0x10000, b""), (1, bytes(0x10000))], ids=["negative", "wide", "long"])
def test_pack_tlvs_too_wide_raises(item: tuple[int, bytes]) -> None:
    """Tags and lengths are 16 bits; nothing is cut silently."""
    with pytest.raises(ConfigError, match="16 bits"):
        pack_tlvs([item])
