"""Storages that are not simply usable: who waits, who is refused, and until when."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from skyproxy.protocol.messages import Chunk
from skyproxy_server.controls import CONTROLS
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.gates import Gate, Gates


class Transfer:
    """A transfer that ends when told to, and notes who waited."""

    def __init__(self) -> None:
        self.over = False
        self.waits = 0

    def finished(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waits += 1
        self.over = True


def failure() -> Failed:
    return Failed(IndexError("no"), "aten::embedding", 1, 0)


def test_a_failed_change_is_raised_until_it_was_delivered_through_any_view() -> None:
    gates, x, failed = Gates(), torch.ones(4), failure()
    gates.mark_failed(x[1:], failed)
    with pytest.raises(PoisonedError) as caught:
        gates.wait_until_usable([x], [])
    assert caught.value.failed is failed
    gates.wait_until_usable([torch.ones(4)], [])
    gates.note_delivery(failed)
    assert not gates
    gates.wait_until_usable([x], [])


def test_indices_are_looked_at_once_their_bytes_have_come() -> None:
    gates, indices = Gates(), torch.zeros(1, 2, dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (3,))
    gates.watch_indices()

    def land() -> None:
        indices.fill_(7)

    gates.close(indices, Gate(None, lambda: True, land))
    with pytest.raises(RuntimeError, match="found index 7"):
        gates.wait_until_usable([sparse], [])


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_failed_change_of_a_sparse_tensor_is_raised_by_it_and_by_its_values(layout: str) -> None:
    gates, failed = Gates(), failure()
    sparse = _LAYOUTS[layout](torch.eye(4))
    values = sparse._values() if layout == "coo" else sparse.values()
    gates.mark_failed(sparse, failed)
    for read in (sparse, values):
        with pytest.raises(PoisonedError):
            gates.wait_until_usable([read], [])
    gates.note_delivery(failed)
    gates.wait_until_usable([sparse, values], [])
    assert not gates


def test_who_changes_a_sparse_tensor_waits_for_its_values_to_leave() -> None:
    gates, transfer, sparse = Gates(), Transfer(), torch.eye(4).to_sparse()
    gates.close(sparse._values(), Gate(None, transfer.finished, transfer.wait, blocks_reads=False))
    gates.wait_until_usable([sparse], [])
    assert transfer.waits == 0
    gates.wait_until_usable([sparse], [sparse])
    assert transfer.waits == 1


def test_delivery_of_one_failure_leaves_the_others() -> None:
    gates, x, first, second = Gates(), torch.ones(4), failure(), failure()
    gates.mark_failed(x, first)
    gates.mark_failed(x, second)
    gates.note_delivery(first)
    with pytest.raises(PoisonedError) as caught:
        gates.wait_until_usable([x], [])
    assert caught.value.failed is second


def test_readers_and_writers_wait_for_what_arrives() -> None:
    gates, x, transfer = Gates(), torch.ones(4), Transfer()
    gates.close(x, Gate(None, transfer.finished, transfer.wait))
    gates.wait_until_usable([torch.ones(4)], [])
    assert transfer.waits == 0
    gates.wait_until_usable([x[2:]], [])
    assert transfer.waits == 1
    assert not gates


def test_only_writers_wait_for_what_leaves() -> None:
    gates, x, transfer = Gates(), torch.ones(4), Transfer()
    gates.close(x, Gate(None, transfer.finished, transfer.wait, blocks_reads=False))
    gates.wait_until_usable([x], [])
    assert transfer.waits == 0
    gates.wait_until_usable([x], [x])
    assert transfer.waits == 1


def test_transfers_that_are_over_are_forgotten_and_others_are_not() -> None:
    gates, done, going = Gates(), Transfer(), Transfer()
    gates.close(torch.ones(4), Gate(None, done.finished, done.wait))
    gates.close(torch.ones(4), Gate(None, going.finished, going.wait))
    done.over = True
    gates.open_finished()
    assert (done.waits, going.waits) == (1, 0)
    assert gates
    gates.wait_for_transfers()
    assert going.waits == 1
    assert not gates


def test_synchronize_waits_for_bytes_that_are_still_arriving() -> None:
    from skyproxy.settings import SETTINGS
    from skyproxy_server.executor import Executor
    from skyproxy_server.transfers import Transfers

    transfers = Transfers(SETTINGS.chunk_bytes)
    executor = Executor([{"type": "cpu", "index": 0, "name": "CPU"}], lambda message: None, transfers, SETTINGS)
    arrival = transfers.arrival(7, 16)
    executor.state.values.gates.close(arrival.target, Gate(None, arrival.finished, arrival.wait))
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (CONTROLS["synchronize"](executor.state), ended.set()))
    thread.start()
    assert not ended.wait(0.2)
    target = transfers.sink(Chunk(7, 0, 16))
    assert target is not None
    target[:16] = bytes(range(16))
    arrival.pieces.append((0, 16))
    arrival.count(16)
    thread.join(10)
    assert ended.is_set()
    assert arrival.target.tolist() == list(range(16))


def test_a_transfer_that_failed_and_left_poison_ends_no_session() -> None:
    gates, x, failed = Gates(), torch.ones(4), failure()

    def wait() -> None:
        raise PoisonedError(failed)

    gates.close(x, Gate(None, lambda: True, wait))
    gates.open_finished()
    assert not gates
    gates.close(x, Gate(None, lambda: True, wait))
    with pytest.raises(PoisonedError):
        gates.wait_until_usable([x], [])
    assert not gates


def test_a_tensor_beyond_its_memory_is_emptied_also_in_a_list() -> None:
    gates, value, other = Gates(), torch.ones(8), torch.ones(2)
    assert not gates.empty_without_memory([value, 3, None, value.to_sparse()])
    value.untyped_storage().resize_(4)
    assert gates.empty_without_memory([other, (value,)])
    assert (value.shape, other.shape) == ((0,), (2,))


def test_a_tensor_whose_memory_was_made_smaller_keeps_its_sizes_and_no_larger_ones() -> None:
    gates, value = Gates(), torch.ones(8)
    value.untyped_storage().resize_(0)
    gates.note_resize(value, 32)
    assert not gates.empty_without_memory(value)
    value.untyped_storage().resize_(36)
    value.as_strided_((9,), (1,))
    value.untyped_storage().resize_(0)
    assert gates.empty_without_memory(value)


def test_a_failed_change_of_a_list_closes_each_of_its_storages() -> None:
    gates, tensors = Gates(), [torch.ones(2), torch.ones(3)]
    gates.mark_failed(tensors, failure())
    for tensor in tensors:
        with pytest.raises(PoisonedError):
            gates.wait_until_usable([tensor], [])


def test_a_nested_tensor_whose_memory_was_made_smaller_is_refused_in_words() -> None:
    gates, nested = Gates(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    gates.note_memory(nested)
    assert not gates
    nested.untyped_storage().resize_(0)
    gates.note_memory(nested)
    with pytest.raises(RuntimeError, match="needs 20"):
        gates.wait_until_usable([nested], [])
