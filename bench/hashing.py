"""Cost of naming blocks: `chain_keys` beside plain hashlib, in one run.

`python -m bench.hashing [--json] [--blocks 8192] [--block-tokens 16] [--rounds 9]`. The plain loops do the same chain,
sha256(parent + 4 bytes a token): one over bytes packed beforehand (hashing alone), one that packs each block of a list.
"""

import argparse
import hashlib
import struct
from collections.abc import Callable

import numpy as np

from bench.report import print_json, print_table, spread, time_in_turns
from kvpool.block import chain_keys

ROOT = bytes(range(32))


def plain_packed(data: bytes, width: int) -> list[bytes]:
    sha256, key, keys = hashlib.sha256, ROOT, []
    for at in range(0, len(data), width):
        key = sha256(key + data[at : at + width]).digest()
        keys.append(key)
    return keys


def plain_list(tokens: list[int], block_tokens: int) -> list[bytes]:
    sha256, key, keys, pack = hashlib.sha256, ROOT, [], struct.Struct(f"<{block_tokens}I").pack
    for at in range(0, len(tokens), block_tokens):
        key = sha256(key + pack(*tokens[at : at + block_tokens])).digest()
        keys.append(key)
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hashing", description="Microseconds per block key.")
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9, help="at least 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.blocks < 1 or args.rounds < 5 or not 1 <= args.block_tokens <= 512:
        parser.error("--blocks must be positive, --block-tokens 1..512, --rounds at least 5")

    array = np.random.default_rng(0).integers(0, 49152, args.blocks * args.block_tokens)
    tokens: list[int] = array.tolist()
    data = array.astype("<u4").tobytes()
    cases: dict[str, Callable[[], object]] = {
        "kvpool_array": lambda: chain_keys(ROOT, array, args.block_tokens),
        "kvpool_list": lambda: chain_keys(ROOT, tokens, args.block_tokens),
        "plain_packed": lambda: plain_packed(data, 4 * args.block_tokens),
        "plain_list": lambda: plain_list(tokens, args.block_tokens),
    }
    expected = plain_packed(data, 4 * args.block_tokens)
    exact = all(run() == expected for run in cases.values())
    seconds = time_in_turns(cases, rounds=args.rounds)
    us = {name: spread([value / args.blocks * 1e6 for value in values]) for name, values in seconds.items()}

    titles = {
        "kvpool_array": "chain_keys, int64 array",
        "kvpool_list": "chain_keys, list",
        "plain_packed": "hashlib loop, bytes packed beforehand",
        "plain_list": "hashlib loop, list, struct.pack per block",
    }
    print(f"{args.blocks} blocks of {args.block_tokens} tokens a call; median of {args.rounds} rounds (range); keys equal: {exact}")
    print_table(
        ("way", "us per block", "to packed loop"),
        [(titles[name], us[name], f"{us[name].median / us['plain_packed'].median:.2f}x") for name in cases],
    )
    if args.json:
        print_json(
            {
                "bench": "hashing",
                "blocks": args.blocks,
                "block_tokens": args.block_tokens,
                "rounds": args.rounds,
                "exact": exact,
                **{f"{name}_us_per_block": value for name, value in us.items()},
                "array_to_plain_packed": us["kvpool_array"].median / us["plain_packed"].median,
                "list_to_plain_list": us["kvpool_list"].median / us["plain_list"].median,
            }
        )
    if not exact:
        raise SystemExit("keys differ from plain hashlib")


if __name__ == "__main__":
    main()
