"""`kvpool inspect`: every copy, its numbers, its holders, its story."""

from collections.abc import Sequence

from kvpool.block import chain_keys
from kvpool.request.admin import MAX_INSPECT_KEYS
from kvpool.testing.twin_cluster import KEYS, ROOT, STRANGER, TEXT, A, B, TwinCluster


def hexes(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def test_inspect_prefix_finds_every_copy_and_the_partial_block(twins: TwinCluster) -> None:
    """The whole text, tail included, wherever its blocks are; programs get the numbers flat."""
    answer = twins.json("inspect", "--prefix", TEXT)
    assert set(answer) == {"model", "blocks", "errors"}
    assert (answer["model"], answer["errors"]) == ("toy", {})
    assert [(block["key"], block["tokens"]) for block in answer["blocks"]] == list(
        zip(hexes(KEYS), [[0, 16], [16, 32], [32, 40]], strict=True)
    )
    assert [[copy["node"] for copy in block["copies"]] for block in answer["blocks"]] == [[A], [A, B], [B]]
    copy = answer["blocks"][1]["copies"][0]
    assert isinstance(copy.pop("age_ms"), int)
    assert isinstance(copy.pop("idle_ms"), int)
    assert copy == {
        "node": A,
        "tiers": [{"name": "arena", "length": 4096, "offset": 0, "state": "committed"}],
        "parent": KEYS[0].hex(),
        "depth": 16,
        "n_tokens": 16,
        "codec": "",
        "flags": ["PURE"],
        "size": 4096,
        "hits": 0,
        "ttl_left_ms": None,
        "priority": 50,
        "tenant": "team",
        "leases": [],
        "lease_count": 0,
        "pins": [],
        "pin_count": 0,
    }
    assert [block["stories"] for block in answer["blocks"]] == [{}, {}, {}]


def test_inspect_of_one_key_tells_its_story_and_holders(twins: TwinCluster) -> None:
    """Who holds it, for how long, and what happened to it on nodes that have it no longer."""
    lease_id = twins.a.lease(KEYS[1:2], "router-[1]\x1b")
    twins.json("pin", KEYS[1].hex(), "--for", "2h", "--owner", "ops", "--node", A)
    twins.json("evict", KEYS[1].hex(), "--node", B)
    (block,) = twins.json("inspect", KEYS[1].hex())["blocks"]
    (copy,) = block["copies"]
    assert [(lease["id"], lease["kind"], lease["owner"]) for lease in copy["leases"]] == [(lease_id, "read", "router-[1]\x1b")]
    assert [(pin["owner"], pin["hard"]) for pin in copy["pins"]] == [("ops", False)]
    assert 0 < copy["pins"][0]["left_ms"] <= 7_200_000
    assert [line.split(": ")[1] for line in block["stories"][A]] == ["committed", "pinned by ops"]
    assert [line.split(": ")[1] for line in block["stories"][B]] == ["committed", "evicted"]
    shown = twins.run("inspect", KEYS[1].hex())
    assert shown.exit_code == 0
    for piece in ("1 of 1 blocks", KEYS[1].hex()[:16], "arena committed", "4.00 KiB", "16-32", "team", "read router-[1]� ", "soft ops 1 h"):
        assert piece in shown.output
    assert "\x1b" not in shown.output
    assert "Story on bbbbbbbb:" in shown.output
    assert ": evicted" in shown.output


def test_inspect_of_what_is_nowhere_says_absent(twins: TwinCluster) -> None:
    """A miss is an answer, with exit code 0."""
    (block,) = twins.json("inspect", STRANGER)["blocks"]
    assert (block["copies"], block["stories"]) == ([], {})
    result = twins.run("inspect", STRANGER)
    assert result.exit_code == 0
    assert "0 of 1 blocks" in result.output
    assert "absent" in result.output
    assert "remembers nothing" in result.output
    assert twins.json("inspect", "--prefix", TEXT, "--chat")["blocks"][0]["copies"] == []
    assert len(twins.json("inspect", "--prefix", "-", stdin=TEXT)["blocks"][2]["copies"]) == 1
    assert twins.json("inspect", "--prefix", "")["blocks"] == []


def test_inspect_of_a_long_text_asks_in_batches(twins: TwinCluster) -> None:
    """More blocks than fit one call; none is lost at the seam, each answer stays with its key."""
    text = "x" * (16 * MAX_INSPECT_KEYS + 1)
    keys = chain_keys(ROOT, [ord("x")] * len(text), 16, tail=True)
    twins.a.put(keys[MAX_INSPECT_KEYS - 1 :], depth=16 * (MAX_INSPECT_KEYS - 1))
    blocks = twins.json("inspect", "--prefix", text)["blocks"]
    assert [block["key"] for block in blocks] == hexes(keys)
    assert [index for index, block in enumerate(blocks) if block["copies"]] == [MAX_INSPECT_KEYS - 1, MAX_INSPECT_KEYS]
    assert blocks[-1]["copies"][0]["depth"] == blocks[-1]["tokens"][0] == 16 * MAX_INSPECT_KEYS
