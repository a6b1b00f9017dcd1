"""WHAT a block is: its identity, its geometry, and the bytes of one stored frame."""

from kvpool.block.frame import Framer, FrameView, check_frame
from kvpool.block.geometry import MAX_BLOCK_TOKENS, Geometry, Segment
from kvpool.block.header import Flags, FrameHeader, decode_header, encode_header
from kvpool.block.identity import KEY_BYTES, BlockKey, Namespace, chain_keys, salted_root
from kvpool.block.layers import LayerSpec

__all__ = [
    "KEY_BYTES",
    "MAX_BLOCK_TOKENS",
    "BlockKey",
    "Flags",
    "FrameHeader",
    "FrameView",
    "Framer",
    "Geometry",
    "LayerSpec",
    "Namespace",
    "Segment",
    "chain_keys",
    "check_frame",
    "decode_header",
    "encode_header",
    "salted_root",
]
