"""Golden vectors of identity and storage, written by an encoder of its own: nothing below is built with kvpool's code.

The literals are append-only. One that changes means that every key or every stored frame in the world changes: add a new
version instead.
"""

import hashlib
import struct

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Geometry, LayerSpec, Namespace, chain_keys, decode_header, encode_header
from kvpool.errors import FrameError

# --- the independent encoder -------------------------------------------------------------------------------------------


def crc32c(data: bytes) -> int:
    """Castagnoli CRC by table, reflected, as in RFC 3720."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def xxh3_64_of_9_to_16(data: bytes) -> int:
    """XXH3 64 bits, seed 0, of 9 to 16 bytes, after the published specification."""
    assert 9 <= len(data) <= 16
    mask = (1 << 64) - 1
    secret = bytes.fromhex("7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e")  # bytes 24..55 of the default secret
    s24, s32, s40, s48 = struct.unpack("<4Q", secret)
    low = struct.unpack_from("<Q", data)[0] ^ s24 ^ s32
    high = struct.unpack_from("<Q", data, len(data) - 8)[0] ^ s40 ^ s48
    product = low * high
    acc = len(data) + int.from_bytes(low.to_bytes(8, "little"), "big") + high + ((product & mask) ^ (product >> 64)) & mask
    acc = (acc ^ acc >> 37) * 0x165667919E3779F9 & mask
    return int(acc ^ acc >> 32)


def field(tag: int, value: bytes) -> bytes:
    return struct.pack("<HH", tag, len(value)) + value


def run(count: int, kind: int, heads: int, k: int, v: int, window: int = 0) -> bytes:
    return struct.pack("<HHHHHI", count, kind, heads, k, v, window)


def root_of(model: str, revision: str, digest: bytes, shape: bytes, rope: str, rank: int, size: int, adapter: str, salt: bytes) -> bytes:
    values = [model.encode(), revision.encode(), digest, shape, rope.encode(), struct.pack("<HH", rank, size), adapter.encode(), salt]
    return hashlib.sha256(b"kvpool/namespace/v1\x00" + b"".join(field(i + 1, v) for i, v in enumerate(values))).digest()


def keys_of(root: bytes, blocks: list[list[int]]) -> list[bytes]:
    keys, parent = [], root
    for block in blocks:
        parent = hashlib.sha256(parent + b"".join(struct.pack("<I", token) for token in block)).digest()
        keys.append(parent)
    return keys


def header_of(
    key: bytes, parent: bytes, root: bytes, *, runs: bytes, layers: int, block: int, n: int, dtype: int, payload: int, checksum: int,
    flags: int = 1, extra: bytes = b"",
) -> bytes:  # fmt: skip
    tlvs = field(0x8001, runs) + field(0x8002, struct.pack("<HQ", 1, checksum)) + extra
    length = -(-(128 + len(tlvs)) // 64) * 64
    fixed = b"KVPB" + struct.pack("<HHI", 1, length, flags) + key + parent + root[:16]
    fixed += struct.pack("<HHHBB", layers, block, n, dtype, 1) + struct.pack("<QI", payload, len(tlvs)) + bytes(12)
    assert len(fixed) == 124
    rest = tlvs + bytes(length - 128 - len(tlvs))
    return fixed + struct.pack("<I", crc32c(fixed + rest)) + rest


# --- the cases ---------------------------------------------------------------------------------------------------------

DIGEST = bytes(range(32))
TINY = Namespace(
    model="tiny", revision="main", weights_digest=DIGEST, geometry=Geometry((LayerSpec("full", 1, 2, 2),), 2, "float16"), rope="none"
)
TINY_RUNS = run(1, 1, 1, 2, 2)
TINY_ROOT = root_of("tiny", "main", DIGEST, struct.pack("<HBBH", 2, 3, 1, 1) + TINY_RUNS, "none", 0, 1, "", b"")

SMOL = Namespace(
    model="SmolLM2-135M-Instruct",
    revision="Q4_1",
    weights_digest=DIGEST,
    geometry=Geometry((LayerSpec("full", 3, 64, 64),) * 30, 16, "float32"),
    rope="theta=100000",
)
SMOL_RUNS = run(30, 1, 3, 64, 64)
SMOL_SHAPE = struct.pack("<HBBH", 16, 1, 1, 30) + SMOL_RUNS
SMOL_ROOT = root_of("SmolLM2-135M-Instruct", "Q4_1", DIGEST, SMOL_SHAPE, "theta=100000", 0, 1, "", b"")

MIXED = Namespace(
    model="mixed/é",
    revision="",
    weights_digest=b"\xff" * 16,
    geometry=Geometry(
        (
            LayerSpec("mla", 1, 576, 0),
            LayerSpec("mla", 1, 576, 0),
            LayerSpec("none", 0, 0, 0),
            LayerSpec("window", 2, 64, 32, 128),
            LayerSpec("full", 4, 128, 128),
        ),
        512,
        "bfloat16",
    ),
    rope="yarn;theta=10000;factor=40",
    part_rank=3,
    part_size=8,
    adapter="lora-7",
    salt=b"tenant\x00a",
)
MIXED_RUNS = run(2, 3, 1, 576, 0) + run(1, 4, 0, 0, 0) + run(1, 2, 2, 64, 32, 128) + run(1, 1, 4, 128, 128)
MIXED_SHAPE = struct.pack("<HBBH", 512, 2, 1, 5) + MIXED_RUNS
MIXED_ROOT = root_of("mixed/é", "", b"\xff" * 16, MIXED_SHAPE, "yarn;theta=10000;factor=40", 3, 8, "lora-7", b"tenant\x00a")

TOKENS = [0, 1, 49151, 2**31, 2**32 - 1, 7, 8]

ROOTS = {
    "tiny": (TINY, TINY_ROOT, "2839403c794cbb1b6439f6eed2fb1f10cacc0a24a26aebaf1cef98842164b338"),
    "smol": (SMOL, SMOL_ROOT, "eedf3ede7fd87bf039f9cd1ee4947bdf278b72bd411df5e4bf2345174d8ed9f6"),
    "mixed": (MIXED, MIXED_ROOT, "ce76feb534bf54de0a79b04c30d74348d8db455c445e059dc87de2c9acafd08b"),
}

TINY_KEYS = keys_of(TINY_ROOT, [[0, 1], [49151, 2**31], [2**32 - 1, 7], [8]])
TINY_KEYS_HEX = [
    "ae93de9bf9854f473c9bcf8247eb620c29f6fcaaadaefcefb2f52e62b4bc02b0",
    "572f0432f3be32aee29f3fa47e7fbcb3e6b9b432b4bd796d2d37847f6f5b387f",
    "5e5128cdf6bbcd10762e409cddf6ad58a7fb20412736e4b2dd7930d0a9d059bf",
    "b56ce29ac89bef63e046fe420160658455bf18e949e80e0677e125dbd01bf204",
]

TINY_PAYLOAD = bytes(range(1, 17))
TINY_FRAME = (
    header_of(
        TINY_KEYS[1], TINY_KEYS[0], TINY_ROOT, runs=TINY_RUNS, layers=1, block=2, n=2, dtype=3, payload=16,
        checksum=xxh3_64_of_9_to_16(TINY_PAYLOAD),
    )
    + TINY_PAYLOAD
)  # fmt: skip
TINY_FRAME_HEX = (
    "4b5650420100c00001000000572f0432f3be32aee29f3fa47e7fbcb3e6b9b432b4bd796d2d37847f6f5b387fae93de9bf9854f473c9bcf8247eb620c29f6fcaa"
    "adaefcefb2f52e62b4bc02b02839403c794cbb1b6439f6eed2fb1f100100020002000301100000000000000020000000000000000000000000000000fd2eb1b3"
    "01800e00010001000100020002000000000002800a0001006a0f45329aeb5aeb0000000000000000000000000000000000000000000000000000000000000000"
    "0102030405060708090a0b0c0d0e0f10"
)

SMOL_KEY = keys_of(SMOL_ROOT, [list(range(16))])[0]
SMOL_TAIL_HEADER = header_of(
    SMOL_KEY, SMOL_ROOT, SMOL_ROOT, runs=SMOL_RUNS, layers=30, block=16, n=5, dtype=1, payload=5 * 46080, checksum=0x0123456789ABCDEF
)
SMOL_TAIL_HEADER_HEX = (
    "4b5650420100c000010000009e9c22fa9a682539dc482025ab00efaedd42db4a15f7aed31036721d3785e720eedf3ede7fd87bf039f9cd1ee4947bdf278b72bd"
    "411df5e4bf2345174d8ed9f6eedf3ede7fd87bf039f9cd1ee4947bdf1e00100005000101008403000000000020000000000000000000000000000000ac69e6be"
    "01800e001e0001000300400040000000000002800a000100efcdab89674523010000000000000000000000000000000000000000000000000000000000000000"
)

MIXED_HEADER = header_of(
    b"\x11" * 32, b"\x22" * 32, MIXED_ROOT, runs=MIXED_RUNS, layers=5, block=512, n=512, dtype=2,
    payload=512 * 2 * (576 * 2 + 2 * 96 + 4 * 256), checksum=2**64 - 1, flags=1 | 32, extra=field(0x0777, b"later"),
)  # fmt: skip
MIXED_HEADER_HEX = (
    "4b565042010000012100000011111111111111111111111111111111111111111111111111111111111111112222222222222222222222222222222222222222"
    "222222222222222222222222ce76feb534bf54de0a79b04c30d743480500000200020201000025000000000053000000000000000000000000000000cf218c39"
    "01803800020003000100400200000000000001000400000000000000000000000100020002004000200080000000010001000400800080000000000002800a00"
    "0100ffffffffffffffff770705006c61746572000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
)

# --- the proofs --------------------------------------------------------------------------------------------------------


def test_encoder_published_check_values_match() -> None:
    """The encoder in this file must itself be right: the check values of RFC 3720 and of xxHash's own suite."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert xxh3_64_of_9_to_16(TINY_PAYLOAD) == 0xEB5AEB9A32450F6A


@pytest.mark.parametrize("name", ROOTS)
def test_root_golden_equals_pinned(name: str) -> None:
    """A namespace has the same root on every machine, for ever."""
    namespace, by_hand, pinned = ROOTS[name]
    assert by_hand.hex() == pinned
    assert namespace.root().hex() == pinned
    assert namespace.fingerprint() == by_hand[:16]


def test_keys_golden_equal_pinned() -> None:
    """Keys are pinned for a list, a tuple and an array alike, with the partial tail block."""
    assert [key.hex() for key in TINY_KEYS] == TINY_KEYS_HEX
    for tokens in (TOKENS, tuple(TOKENS), np.array(TOKENS, dtype=np.int64), np.array(TOKENS, dtype=np.uint32)):
        assert [key.hex() for key in chain_keys(TINY.root(), tokens, 2, tail=True)] == TINY_KEYS_HEX
        assert [key.hex() for key in chain_keys(TINY.root(), tokens, 2)] == TINY_KEYS_HEX[:3]


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("bit", [0, 31])
def test_keys_token_bit_flipped_changes_own_and_later_keys(at: int, bit: int) -> None:
    """A key names its whole prefix: earlier blocks keep their keys, this one and all after it get others."""
    flipped = list(TOKENS)
    flipped[at] ^= 1 << bit
    keys = chain_keys(TINY.root(), flipped, 2, tail=True)
    assert [a.hex() == b for a, b in zip(keys, TINY_KEYS_HEX, strict=True)] == [index < at // 2 for index in range(4)]


@pytest.mark.parametrize("change", [-1, 1])
def test_keys_root_one_byte_short_or_long_differs_or_raises(change: int) -> None:
    """The canonical bytes are hashed whole: one byte less or more is another namespace."""
    canonical = TINY.canonical()
    other = canonical[:change] if change < 0 else canonical + b"\x00"
    assert hashlib.sha256(b"kvpool/namespace/v1\x00" + other).hexdigest() != ROOTS["tiny"][2]
    assert hashlib.sha256(b"kvpool/namespace/v1\x00" + canonical).hexdigest() == ROOTS["tiny"][2]


def test_frame_golden_is_what_framer_writes_and_opens() -> None:
    """The stored bytes are pinned in both directions, header and payload."""
    assert TINY_FRAME.hex() == TINY_FRAME_HEX
    framer = Framer(TINY)
    key, parent = BlockKey(TINY_KEYS[1]), BlockKey(TINY_KEYS[0])
    assert framer.header(key, parent, 2, framer.checksum(TINY_PAYLOAD)) + TINY_PAYLOAD == TINY_FRAME
    frame = np.zeros(framer.frame_bytes(2), np.uint8)
    frame[framer.header_bytes :] = np.frombuffer(TINY_PAYLOAD, np.uint8)
    framer.stamp(frame, key, parent, 2)
    assert frame.tobytes() == TINY_FRAME
    view = framer.open(bytes.fromhex(TINY_FRAME_HEX), key)
    assert (view.n_tokens, view.payload.tobytes(), view.parent, view.approx) == (2, TINY_PAYLOAD, parent, False)


@pytest.mark.parametrize("length", [*range(208), 209, 272])
def test_frame_golden_other_length_raises(length: int) -> None:
    """One byte short, one byte long, or cut anywhere: never a frame."""
    data = (TINY_FRAME + bytes(64))[:length]
    with pytest.raises(FrameError):
        Framer(TINY).open(data, BlockKey(TINY_KEYS[1]))


@pytest.mark.parametrize("at", range(208))
def test_frame_golden_bit_flipped_raises(at: int) -> None:
    """No byte of a frame is ignored: each bit of header and payload counts."""
    framer = Framer(TINY)
    for bit in range(8):
        data = bytearray(TINY_FRAME)
        data[at] ^= 1 << bit
        with pytest.raises(FrameError):
            framer.open(data, BlockKey(TINY_KEYS[1]))
        if at < framer.header_bytes:
            with pytest.raises(FrameError):
                decode_header(data)


@pytest.mark.parametrize("at", range(124))
def test_frame_golden_bit_flipped_under_good_crc_raises(at: int) -> None:
    """The crc finds damage, not lies: a writer that signs nonsense in the fixed part is refused as well."""
    framer = Framer(TINY)
    for bit in range(8):
        data = bytearray(TINY_FRAME)
        data[at] ^= 1 << bit
        data[124:128] = struct.pack("<I", crc32c(bytes(data[:124] + data[128:192])))
        if 44 <= at < 76 or (at == 8 and bit == 4):  # another parent, or a sidecar mark: a valid frame that says so
            view = framer.open(data, BlockKey(TINY_KEYS[1]))
            assert (view.parent, int(view.flags)) == (bytes(data[44:76]), data[8])
            continue
        with pytest.raises(FrameError):
            framer.open(data, BlockKey(TINY_KEYS[1]))


def test_header_golden_partial_tail_equals_pinned() -> None:
    """A partial tail of a real model's geometry; its parent is the root."""
    assert SMOL_TAIL_HEADER.hex() == SMOL_TAIL_HEADER_HEX
    assert Framer(SMOL).header(BlockKey(SMOL_KEY), BlockKey(b""), 5, 0x0123456789ABCDEF) == SMOL_TAIL_HEADER
    header = decode_header(SMOL_TAIL_HEADER)
    assert (header.n_tokens, header.payload_bytes, header.header_bytes, header.geometry) == (5, 230_400, 192, SMOL.geometry)
    assert encode_header(header) == SMOL_TAIL_HEADER


def test_header_golden_mixed_layers_with_skippable_field_equals_pinned() -> None:
    """Every kind of layer, a flag, and a field from a later version survive a round trip."""
    assert MIXED_HEADER.hex() == MIXED_HEADER_HEX
    header = decode_header(MIXED_HEADER)
    assert header.extra == ((0x0777, b"later"),)
    assert header.geometry == MIXED.geometry
    assert header.fingerprint == MIXED.fingerprint()
    assert header.header_bytes == len(MIXED_HEADER)
    assert encode_header(header) == MIXED_HEADER


@pytest.mark.parametrize("golden", [SMOL_TAIL_HEADER, MIXED_HEADER], ids=["smol", "mixed"])
def test_header_golden_damaged_raises(golden: bytes) -> None:
    """One byte short, and one bit flipped at every byte, for headers of one run and of several."""
    with pytest.raises(FrameError):
        decode_header(golden[:-1])
    for at in range(len(golden)):
        data = bytearray(golden)
        data[at] ^= 1 << at % 8
        with pytest.raises(FrameError):
            decode_header(data)
