"""The bytes of blocks, in both layouts: the same ones, wherever the blocks lie."""

import random
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.block import Geometry
from kvpool.engine.model import Model
from kvpool.engine.paged import windows
from kvpool.engine.paged.attention import Segment
from kvpool.engine.paged.blocks import Copy
from kvpool.engine.paged.store import KvStore, pieces
from kvpool.engine.paged.windows import VirtualKvStore
from kvpool.errors import ConfigError

GEOMETRY = Geometry.uniform(layers=3, kv_heads=2, head_dim=16, block_tokens=64, dtype="float32")
SCATTERED = [5, 6, 1, 9, 2, 3, 4]


def filled(kind: type[KvStore]) -> KvStore:
    torch.manual_seed(0)
    store = kind(GEOMETRY, 10)
    for array in (store.keys, store.values):
        array.copy_(torch.randn_like(array))
    return store


@pytest.fixture(params=[KvStore, VirtualKvStore])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_scattered_blocks_are_read_in_order(kind: type[KvStore]) -> None:
    """Gathered or mapped: what is read is what lies in the blocks, as they are at that moment."""
    store = filled(kind)
    for owner, blocks, tokens in (
        (1, SCATTERED, 400),
        (2, [7, 8, 0], 130),
        (1, [*SCATTERED, 0], 500),
        (1, [5, 6, 0, 9], 250),
        (1, [5, 0, 9], 180),
        (1, [5, 6, 0, 9], 250),
        (3, [4, 5], 128),
    ):
        index = torch.cat([torch.arange(64 * block, 64 * block + 64) for block in blocks])[:tokens]
        for layer in range(3):
            keys, values = store.read(layer, owner, blocks, pieces(blocks), tokens)
            assert torch.equal(keys[0], store.keys[layer][:, index])
            assert torch.equal(values[0], store.values[layer][:, index])
    store.keys[1, 0, 64 * 9] = 7.0
    read = [store.read(layer, 1, [5, 6, 0, 9], pieces([5, 6, 0, 9]), 250)[0].clone() for layer in range(3)]
    assert (read[1][0, 0, 192] == 7.0).all()
    del keys, values
    store.close()


def test_memory_that_was_touched_is_not_waited_for_again() -> None:
    """A first load would spend its time on pages; no more is taken than there is."""
    geometry = Geometry.uniform(layers=30, kv_heads=4, head_dim=16, block_tokens=64, dtype="float32")

    def faults(touched: bool) -> int:
        store = KvStore(geometry, 4000)
        if touched:
            store.touch(100)
        payload = np.zeros(geometry.payload_bytes(64), np.uint8)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        store.write_block(0, 64, payload)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    assert faults(touched=False) >= 240  # a page in each layer and head, of keys and values
    assert faults(touched=True) < 120
    KvStore(GEOMETRY, 1).touch(1 << 30)


def test_virtual_layout_gathers_nothing_and_shares_pages() -> None:
    """What the paged layout copies for every pass and layer, this one reads where it is."""
    paged, virtual = filled(KvStore), filled(VirtualKvStore)
    for store in (paged, virtual):
        for owner in (1, 2):  # one prefix, two sequences
            for layer in range(3):
                store.read(layer, owner, [0, 1, 3 * owner], pieces([0, 1, 3 * owner]), 192)
    assert (paged.gathered_bytes, virtual.gathered_bytes) == (2 * 192 * GEOMETRY.bytes_per_token, 0)
    assert isinstance(virtual, VirtualKvStore)
    assert virtual.mapped_bytes == paged.gathered_bytes
    virtual.close()


def test_window_stays_as_long_as_somebody_looks_at_it_and_no_longer() -> None:
    """A pass that is under way when the engine closes must not die; and nothing may stay mapped."""

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvpool-kv")

    before, store = maps(), filled(VirtualKvStore)
    keys, values = store.read(0, 1, [5, 1, 9], pieces([5, 1, 9]), 192)
    seen = keys.clone()
    del values
    store.close()
    assert torch.equal(keys, seen)
    assert maps() > before
    del keys
    assert maps() == before


def test_windows_are_bounded_and_too_many_pieces_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel allows so many mappings: old windows go, and what would take too many is copied, and counted."""
    monkeypatch.setattr(windows, "MAX_MAPS", 100)
    monkeypatch.setattr(windows, "MAX_RUNS", 3)
    store = VirtualKvStore(GEOMETRY, 10)
    for owner in range(20):
        for layer in range(3):
            store.read(layer, owner, [0, 2, 4], pieces([0, 2, 4]), 192)
    assert 1 <= len(store._windows) <= 100 // (6 * 4)
    assert store.gathered_bytes == 0
    store.read(0, 99, [0, 2, 4, 6], pieces([0, 2, 4, 6]), 256)
    assert store.gathered_bytes > 0
    store.close()


def test_pass_over_more_sequences_than_there_may_be_windows_reads_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that went for another sequence of the same pass is mapped again at the next layer."""
    monkeypatch.setattr(windows, "MAX_WINDOWS", 2)
    store, tables = filled(VirtualKvStore), {1: [5, 1], 2: [2, 9], 3: [3, 0], 4: [8, 4]}
    for layer in range(3):
        for owner, blocks in tables.items():
            keys, values = store.read(layer, owner, blocks, pieces(blocks), 128)
            index = torch.cat([torch.arange(64 * block, 64 * block + 64) for block in blocks])
            assert torch.equal(keys[0], store.keys[layer][:, index])
            assert torch.equal(values[0], store.values[layer][:, index])
            del keys, values
    store.close()


def test_block_that_does_not_end_with_a_page_is_refused() -> None:
    """Pages can't be cut; the message says which flag to change."""
    with pytest.raises(ConfigError, match=r"--block-tokens .* or --layout paged"):
        VirtualKvStore(replace(GEOMETRY, block_tokens=16), 4)


def test_layouts_give_equal_bits(model: Model) -> None:
    """The same bytes in the same order by the same kernel."""
    prompt = random.Random(3).choices(range(256), k=300)
    network = Model(model._network, replace(model.namespace, geometry=replace(model.geometry, block_tokens=64)))
    found = []
    for kind in (KvStore, VirtualKvStore):
        store = kind(network.geometry, 10)
        network.run(store, [Segment(SCATTERED, 0, prompt[:200], scores=False, owner=1)])
        found.append(network.run(store, [Segment(SCATTERED, 200, prompt[200:], owner=1)]))
        store.close()
    assert torch.equal(found[0], found[1])


def test_copy_on_write_leaves_the_source_alone(kind: type[KvStore]) -> None:
    """As many tokens as asked for, in every layer; the parent's bits stay."""
    store = filled(kind)
    before = store.keys.clone(), store.values.clone()
    store.copy([Copy(2, 8, 5)])
    for array, old in zip((store.keys, store.values), before, strict=True):
        assert torch.equal(array[:, :, 512:517], old[:, :, 128:133])
        array[:, :, 512:517] = old[:, :, 512:517]
        assert torch.equal(array, old)
    store.close()


def test_layers_of_a_payload_can_come_one_by_one(kind: type[KvStore]) -> None:
    """A payload is layer-major, so any run of layers of it is a payload of these layers."""
    store, other = filled(kind), kind(GEOMETRY, 10)
    payload = np.empty(GEOMETRY.payload_bytes(9), np.uint8)
    store.copy_block(3, 9, payload)
    for layer in range(3):
        other.write_block(7, 9, payload.reshape(3, -1)[layer], first=layer)
    again = np.empty_like(payload)
    other.copy_block(7, 9, again)
    assert (again == payload).all()
    for gone in (store, other):
        gone.close()
