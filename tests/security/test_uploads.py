"""What clients can learn of one another's uploads, and what they can make a peer allocate by a number."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import ProtocolError
from skyproxy.payloads.pieces import Assembly, plain_memory
from skyproxy.payloads.tensors import memory_for
from skyproxy.protocol.call_messages import CallData
from skyproxy.protocol.digests import content_digest, content_proof
from skyproxy.protocol.messages import Chunk, Hello, Known, Offer, Proof
from skyproxy.settings import Settings
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server.blobs import BlobStore
from skyproxy_server.listener import Listener, serve
from skyproxy_server.tokens import Tokens
from skyproxy_server.transfers import Transfers
from skyproxy_server.worker_host import WorkerHost

SIZE = 1000
SECRET = bytes(range(250)) * 4
ALICE = "alice-0123456789abcdef01234567"
MALLORY = "mallory-0123456789abcdef012345"
CPU = {"type": "cpu", "index": 0, "name": "cpu"}


def digest(data: bytes) -> bytes:
    return content_digest(memoryview(data))


def hashed(store: BlobStore) -> None:
    """Wait until everything that came is hashed."""
    store._finished.put(None)
    store._hasher.join(30)
    store._hasher = threading.Thread(target=store._hash, daemon=True)
    store._hasher.start()


def upload(store: BlobStore, owner: str, data: bytes = SECRET) -> None:
    transfers = Transfers(SIZE, blobs=store, user=f"session of {owner}", owner=owner)
    transfers.on_offer(Offer(1, len(data), b""))
    sink = transfers.sink(Chunk(1, 0, len(data)))
    assert sink is not None
    sink[: len(data)] = data
    transfers.on_chunk(Chunk(1, 0, len(data), (sink[: len(data)],)))
    hashed(store)


@pytest.fixture(params=[False, True], ids=["apart", "shared"])
def store(request: pytest.FixtureRequest) -> Iterator[BlobStore]:
    made = BlobStore(10 * SIZE, shared=request.param)
    yield made
    made.close()


def test_a_known_hash_yields_nothing_of_another_token(store: BlobStore) -> None:
    upload(store, "alice")
    mallory = Transfers(SIZE, blobs=store, user="m", owner="mallory")
    offer = Offer(7, SIZE, digest(SECRET))
    nonce = mallory.challenge(offer)
    assert bool(nonce) is store.shared
    known = mallory.on_proof(Proof(7, digest(SECRET))) if nonce else mallory.on_offer(offer)
    assert not known
    assert not mallory.arrival(7, SIZE).finished()  # its bytes are awaited, as of one that nobody has


def test_how_much_is_kept_is_told_of_a_tokens_own_uploads(store: BlobStore) -> None:
    upload(store, "alice")
    upload(store, "bob", SECRET[::-1])
    upload(store, "bob", SECRET)
    told = {owner: Transfers(SIZE, blobs=store, owner=owner).blob_stats() for owner in ("alice", "bob", "mallory", "")}
    of_all = 2 if store.shared else 3
    expected = dict.fromkeys(told, of_all) if store.shared else {"alice": 1, "bob": 2, "mallory": 0, "": of_all}
    for owner, stats in told.items():
        assert stats is not None
        assert (stats["blobs"], stats["bytes"]) == (expected[owner], expected[owner] * SIZE)


def test_whoever_has_shared_content_shows_that_and_gets_it() -> None:
    store = BlobStore(10 * SIZE, shared=True)
    upload(store, "alice")
    bob = Transfers(SIZE, blobs=store, user="b", owner="bob")
    nonce = bob.challenge(Offer(7, SIZE, digest(SECRET)))
    assert bob.on_proof(Proof(7, content_proof(memoryview(SECRET), nonce)))
    assert bytes(bob.arrival(7, SIZE).wait().numpy()) == SECRET
    assert not bob.challenge(Offer(8, SIZE, digest(SECRET)))  # once is enough
    store.close()


@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_proof_needs_every_byte(place: int) -> None:
    nearly = bytearray(SECRET)
    nearly[place] ^= 1
    nonce = bytes(32)
    assert content_proof(memoryview(nearly), nonce) != content_proof(memoryview(SECRET), nonce)
    assert content_proof(memoryview(SECRET), bytes(31) + b"x") != content_proof(memoryview(SECRET), nonce)


def test_a_proof_that_nobody_asked_for_is_refused(store: BlobStore) -> None:
    with pytest.raises(ProtocolError, match="nobody has asked for"):
        Transfers(SIZE, blobs=store).on_proof(Proof(1, b"x" * 32))


def test_clients_of_one_token_use_one_anothers_uploads(store: BlobStore) -> None:
    upload(store, "alice")
    again = Transfers(SIZE, blobs=store, user="later", owner="alice")
    offer = Offer(2, SIZE, digest(SECRET))
    assert not again.challenge(offer)
    assert again.on_offer(offer)


def test_an_offer_without_bytes_reserves_nothing(store: BlobStore) -> None:
    upload(store, "alice")
    mallory = Transfers(SIZE, blobs=store, user="m", owner="mallory")
    for number in range(100):
        mallory.on_offer(Offer(number, 9 * SIZE, b""))
    assert store.stats()["bytes"] == SIZE  # what was there still is, and nothing else
    upload(store, "bob", bytes(SIZE))
    assert store.stats()["bytes"] == 2 * SIZE


def test_a_token_keeps_no_more_than_it_may() -> None:
    store = BlobStore(10 * SIZE)
    transfers = Transfers(SIZE, blobs=store, user="a", owner="alice", most_blob_bytes=SIZE + 10)
    for number in (1, 2):
        transfers.on_offer(Offer(number, SIZE, b""))
    for number in (1, 2):
        sink = transfers.sink(Chunk(number, 0, SIZE))
        assert sink is not None
        transfers.on_chunk(Chunk(number, 0, SIZE, (sink[:SIZE],)))
    hashed(store)
    assert store.stats()["bytes"] == SIZE
    store.close()


@contextmanager
def worker(folder: Path, shared: bool) -> Iterator[Listener]:
    for name, token in (("alice", ALICE), ("mallory", MALLORY)):
        (folder / name).write_text(token)
        (folder / name).chmod(0o600)
    settings = Settings(close_timeout_seconds=0.3)
    store = BlobStore(64 << 20, shared=shared)
    host = WorkerHost([CPU], settings, blobs=store)
    listener = serve("127.0.0.1", 0, Tokens(folder), host, settings=settings)
    try:
        listener.store = store  # type: ignore[attr-defined]
        yield listener
    finally:
        listener.close()
        store.close()


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_two_clients_of_two_tokens_over_the_wire(tmp_path: Path, shared: bool) -> None:
    weights = torch.arange(1 << 19, dtype=torch.float32)
    with worker(tmp_path, shared) as listener:
        url = f"ws://127.0.0.1:{listener.port}"
        with skyproxy.connect(url, token=ALICE) as alice:
            weights.to(alice.device("cpu"))
            alice.synchronize()
        hashed(listener.store)  # type: ignore[attr-defined]
        for token, saves in ((MALLORY, shared), (ALICE, True)):
            with skyproxy.connect(url, token=token) as node:
                assert torch.equal(weights.to(node.device("cpu")).cpu(), weights)
                assert (node._session.bytes_saved > 0) is saves
        operations, welcome = connect_websocket(url, MALLORY, Hello([1], "operations", "", {}))
        bulk, _ = connect_websocket(url, MALLORY, Hello([1], "bulk", welcome.session, {}))
        other = torch.ones(1 << 19)
        bulk.send(Offer(5, other.nbytes, digest(bytes(other.numpy()))))
        answer = bulk.recv(20)
        assert answer == Known(5, False)
        bulk.close()
        operations.close()


# --- numbers that a peer sends ----------------------------------------------------------------------------------------


class Counting:
    """An `allocate` that notes how much it was asked for."""

    def __init__(self, allocate: Any) -> None:
        self.asked = 0
        self._allocate = allocate

    def __call__(self, index: int, size: int) -> Any:
        self.asked += size
        return self._allocate(index, size)


@pytest.mark.parametrize("sizes", [[3 << 30], [1 << 20] * 3000, [100, 3 << 30]])
def test_a_payload_takes_memory_as_its_bytes_come(sizes: list[int]) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if Path("/proc/self/statm").exists() else 0

    before = resident()
    for allocate in (plain_memory, memory_for({"bases": [0] * (len(sizes) - 1)}, len(sizes))):
        counting = Counting(allocate)
        assembly: Assembly[Any] = Assembly(sizes, (), counting, 64 << 30)
        assert counting.asked == 0
        assembly.add(CallData("c", 0, 0, 0, (b"x",)))
        assert counting.asked == sizes[0]
        assert resident() - before < 100 << 20
        with pytest.raises(ProtocolError, match="does not fit"):  # the next piece, before this one is there
            assembly.add(CallData("c", 0, min(1, len(sizes) - 1), 0, (b"x",)))


def test_a_payload_that_no_memory_can_hold_is_a_clear_error() -> None:
    assembly: Assembly[Any] = Assembly([1 << 60], (), plain_memory, 1 << 62)
    with pytest.raises(ProtocolError, match="no memory"):
        assembly.add(CallData("c", 0, 0, 0, (b"x",)))


def test_chunks_of_transfers_that_nobody_announces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyproxy_server.transfers._MOST_UNANNOUNCED", 10)
    transfers = Transfers(SIZE)
    for number in range(10):
        transfers.sink(Chunk(number, 0, 1 << 30))
    with pytest.raises(ProtocolError, match="no command speaks of"):
        transfers.sink(Chunk(10, 0, 1 << 30))


def test_chunks_without_a_byte_are_refused() -> None:
    with pytest.raises(ProtocolError, match="without a byte"):
        Transfers(SIZE).on_chunk(Chunk(1, 0, SIZE, (b"",)))
