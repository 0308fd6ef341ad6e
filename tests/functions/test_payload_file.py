"""Large payloads for several workers of this machine: written once, and read by each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import skyproxy as sky
from skyproxy.functions import Payload
from skyproxy.functions.payload_file import PayloadFile

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files without a name are there on Linux only")
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=2) as pool:
        assert pool.broadcast(sum, [1, 2]) == [3, 3]
        yield pool


@sky.compute
def digest_and_change(text: bytes, array: np.ndarray, tensor: torch.Tensor) -> tuple[int, float, float, int]:
    before = float(array.sum()), tensor.sum().item()
    array += 1
    tensor.mul_(2)
    return sum(text[:100]), before[0], before[1], sky.instance_info().rank


def sent(pool: sky.Compute) -> list[int]:
    return [node._session.bytes_sent for node in pool.nodes]


def open_files() -> list[str]:
    """The payloads that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:  # it was that of the folder itself
            continue
    return [name for name in found if "skyproxy-payload" in name]


def arguments() -> tuple[bytes, np.ndarray, torch.Tensor]:
    return (
        bytes(range(100)) * 30_000,
        np.arange(300_000, dtype=np.float64),
        torch.arange(500_000.0).requires_grad_(False),
    )


def expected(text: bytes, array: np.ndarray, tensor: torch.Tensor) -> list[tuple[int, float, float, int]]:
    return [(sum(text[:100]), float(array.sum()), tensor.sum().item(), rank) for rank in range(2)]


def test_what_a_broadcast_carries_is_written_once_and_is_each_ranks_own(pool: sky.Compute) -> None:
    given = arguments()
    before = sent(pool)
    assert digest_and_change(*given) @ pool == expected(*given)
    assert all(after - other < MIB for after, other in zip(sent(pool), before)), "nothing of it was sent"
    assert open_files() == []
    assert digest_and_change(*given) @ pool == expected(*given), "what a rank has changed is its own"


def test_a_worker_that_cannot_open_it_is_sent_the_bytes(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(PayloadFile):
        """Is closed before anybody has opened it."""

        def __init__(self, pieces: object) -> None:
            super().__init__(pieces)  # type: ignore[arg-type]
            self.close()

    monkeypatch.setattr("skyproxy.functions.payload_file.PayloadFile", Closed)
    given, before = arguments(), sent(pool)
    assert digest_and_change(*given) @ pool == expected(*given)
    assert all(after - other > 5 * MIB for after, other in zip(sent(pool), before))


def test_a_file_of_another_size_is_not_taken(pool: sky.Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(PayloadFile):
        """Lacks its last bytes."""

        def __init__(self, pieces: object) -> None:
            super().__init__(pieces)  # type: ignore[arg-type]
            os.ftruncate(self._descriptor, 1000)

    monkeypatch.setattr("skyproxy.functions.payload_file.PayloadFile", Short)
    given = arguments()
    assert digest_and_change(*given) @ pool == expected(*given)
    assert open_files() == []


def test_small_payloads_have_no_file() -> None:
    assert PayloadFile.of(Payload.of(sum, ([1, 2],))) is None


def test_a_file_ends_when_the_last_call_has_begun() -> None:
    class Begins:
        def add_started_callback(self, callback):
            self.begin = callback

    file = PayloadFile.of(Payload.of(sum, (b"x" * 2 * MIB,)))
    assert file is not None
    content = Path(file.path).read_bytes()
    assert len(content) == sum(file.sizes) > 2 * MIB
    calls = [Begins(), Begins()]
    file.close_after(calls)
    calls[0].begin()
    assert len(open_files()) == 1
    calls[1].begin()
    assert open_files() == []
    file.close()
