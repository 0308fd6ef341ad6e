"""Tensors lent from one process to another: whose memory it is, what moves, and what a borrower is not believed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.torch_codec import Description
from skyproxy_server.functions import lent_tensors
from skyproxy_server.functions.lent_tensors import Borrowed, LentTensors, tensor_in
from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("processes of functions need Linux", allow_module_level=True)


def borrow(lent: LentTensors) -> Borrowed:
    """What another process makes of it, in this one."""
    storages, rows, files = lent.describe()
    return Borrowed(storages, rows, [os.dup(file) for file in files])


def test_what_moves_once_stays_and_all_views_follow() -> None:
    whole = torch.arange(6.0)
    view, outside = whole[2:4], torch.zeros(2)
    lent = LentTensors([view], [None, whole, view, outside])
    [theirs] = borrow(lent).tensors
    theirs.add_(10)
    assert whole.tolist() == [0, 1, 12, 13, 4, 5]
    assert not outside.untyped_storage().is_shared()
    place = whole.data_ptr()
    [again] = borrow(LentTensors([whole], [whole, view])).tensors
    again.zero_()
    assert (whole.data_ptr(), view.tolist()) == (place, [0, 0])


def test_what_somebody_else_holds_is_copied_and_copied_back() -> None:
    held = torch.zeros(3)
    other = held.detach()  # not among the session's values
    lent = LentTensors([held], [held])
    [theirs] = borrow(lent).tensors
    theirs.add_(1)
    assert held.tolist() == [0, 0, 0]
    version = held._version
    assert lent.take_back([0]) == [0]
    assert held.tolist() == other.tolist() == [1, 1, 1]
    assert held._version > version


def test_two_arguments_of_one_storage_are_one_memory_there() -> None:
    whole = torch.arange(4.0)
    halves = [whole[:2], whole[2:], torch.empty(0), torch.view_as_real(torch.ones(2, dtype=torch.cfloat)).select(1, 0)]
    first, second, empty, strided = borrow(LentTensors(halves, [whole, *halves])).tensors
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (empty.shape, strided.tolist(), strided.stride()) == ((0,), [1, 1], (2,))


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_what_has_no_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="has no memory that could be lent to a process of its own"):
        LentTensors([tensor], [tensor])


@pytest.mark.parametrize("changed", [[1], [-1], [True], "0", None, [0.0]])
def test_a_borrower_changes_no_other_tensor(changed: object) -> None:
    given = torch.zeros(2)
    lent = LentTensors([given], [given])
    with pytest.raises(ProtocolError):
        lent.take_back(changed)


@pytest.mark.parametrize("number", [1, -1, True, "0", None])
def test_a_borrower_names_no_other_storage(number: object) -> None:
    given = torch.zeros(2)
    with pytest.raises(ProtocolError):
        LentTensors([given], [given]).storage(number)


@pytest.mark.parametrize(
    "description",
    [
        Description((5,), (1,), 0, torch.float32),
        Description((4,), (1,), 1, torch.float32),
        Description((2,), (1 << 61,), 0, torch.float32),
        Description((-1,), (1,), 0, torch.float32),
        Description((2,), (-1,), 3, torch.float32),
        Description((2,), (), 0, torch.float32),
        Description((2, 2), (), 0, torch.float32, torch.sparse_coo),
    ],
)
def test_no_view_reaches_beyond_its_memory(description: Description) -> None:
    storage = torch.UntypedStorage(16)
    with pytest.raises(ProtocolError):
        tensor_in(storage, description)
    assert storage.nbytes() == 16


class FakeCuda:
    """CUDA's sharing of memory between processes, as strict as torch and the driver are.

    A storage is wrapped once more with each share, so it is shared once. Its memory is kept until that was counted
    down. A handle is opened in a process that has initialised CUDA, which a real one does not survive otherwise, and
    while the lender has the memory; what it computes is there once its stream was waited for.
    """

    def __init__(self) -> None:
        self.is_initialized = False
        self.shared: dict[bytes, weakref.ref[torch.UntypedStorage]] = {}
        self.counted: list[tuple[bytes, int]] = []
        self.places: set[tuple[int, int]] = set()
        self.waits = 0

    def init(self) -> None:
        self.is_initialized = True

    def current_stream(self, device: torch.device) -> FakeCuda:
        return self

    def synchronize(self) -> None:
        self.waits += 1

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        key = storage.data_ptr(), storage.nbytes()
        assert key not in self.places
        self.places.add(key)
        handle = b"handle %d" % len(self.shared)
        self.shared[handle] = weakref.ref(storage)
        self.counted.append((b"counter of " + handle, len(self.counted)))
        return 0, handle, storage.nbytes(), 0, *self.counted[-1], b"event", True

    def new(self, *handle: Any) -> torch.UntypedStorage:
        assert self.is_initialized
        device, name, size, offset, _, _, event, must_wait = handle
        assert (device, offset, event, must_wait) == (0, 0, b"event", False)
        assert self.waits
        self.waits -= 1
        storage = self.shared[name]()
        assert storage is not None
        assert storage.nbytes() == size
        return storage

    def release(self, counter: bytes, position: int) -> None:
        self.counted.remove((counter, position))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "init", fake.init)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(lent_tensors, "kind_of", lambda storage: "cuda")
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: fake.share(storage), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fake.new, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", fake.release, raising=False)
    return fake


def test_memory_of_a_gpu_is_lent_where_it_is_and_shared_once(fake_cuda: FakeCuda) -> None:
    whole = torch.arange(4.0)
    place = whole.data_ptr()
    for _ in range(2):
        lent = LentTensors([whole[1:], whole], [whole])
        tensors: Sequence[torch.Tensor] = borrow(lent).tensors
        tensors[0].add_(1)
        lent.release()
    assert (whole.tolist(), whole.data_ptr()) == ([0, 3, 4, 5], place)
    assert len(fake_cuda.shared) == 1
    whole.resize_(100)
    borrow(LentTensors([whole], [whole]))
    assert len(fake_cuda.shared) == 2
    assert not fake_cuda.counted  # a borrower that crashes counts nothing down


def test_an_empty_tensor_of_a_gpu_has_no_handle(fake_cuda: FakeCuda) -> None:
    [theirs] = borrow(LentTensors([torch.empty(0, 3)], [])).tensors
    assert (tuple(theirs.shape), fake_cuda.shared) == ((0, 3), {})


def test_what_was_lent_is_not_kept_by_whoever_still_knows_of_the_loan(fake_cuda: FakeCuda) -> None:
    given = torch.zeros(2)
    lent = LentTensors([given], [given])
    lent.describe()
    tensor, storage = weakref.ref(given), weakref.ref(given.untyped_storage())
    del given
    assert storage() is not None
    lent.release()
    assert (tensor(), storage()) == (None, None)


def test_memory_of_a_gpu_that_cannot_be_shared_is_lent_as_a_copy_and_copied_back(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(4.0)
    lent = LentTensors([whole[:2], whole[2:]], [whole])
    borrow(lent)
    assert len(fake_cuda.shared) == 1
    lent.lend_copies("invalid resource handle")
    borrowed = borrow(lent)
    first, second = borrowed.tensors
    second.add_(1)
    assert (whole.tolist(), len(fake_cuda.shared)) == ([0, 1, 2, 3], 1)
    borrowed.give_back([1])
    assert lent.take_back([1]) == [1]
    assert (whole.tolist(), first.tolist()) == ([0, 1, 3, 4], [0, 1])
    assert borrowed.number_of(second) == borrowed.number_of(first) == 0


def test_a_storage_that_the_driver_does_not_share_is_lent_as_a_copy(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(storage: torch.UntypedStorage) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", refuse, raising=False)
    [theirs] = borrow(LentTensors([torch.ones(2)], [])).tensors
    assert theirs.tolist() == [1, 1]
