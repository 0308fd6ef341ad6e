"""Storages that are not simply usable: bytes still arriving or leaving, a change that failed, or too few bytes.

While any gate is closed, the executor looks at the storages of every op; otherwise it looks at none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.layouts import needed_bytes
from skyproxy_server.sparse_indices import WatchedIndices, check_distinct, parts_of

_NO_STORAGE = 0
"""The key of what closes no storage: see `Gates.hold`."""
_SHRUNK = -1
"""The key that is closed while any storage is smaller than it had been."""
_INDICES = -2
"""The key that is closed once the client may have the indices of a sparse tensor as a dense one, and write to them."""


@dataclass(slots=True)
class Gate:
    """The reason why a storage is not simply usable.

    Attributes:
        storage: kept alive, so that its address stays its own.
        finished: whether the transfer is over; None for a failed change.
        wait: waits for the transfer; raises PoisonedError if it failed.
        blocks_reads: whether readers must wait too, or writers only.
        failed: the command that should have changed the storage.
    """

    storage: torch.UntypedStorage | None
    finished: Callable[[], bool] | None = None
    wait: Callable[[], None] | None = None
    blocks_reads: bool = True
    failed: Failed | None = None


def storage_key(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage; None for layouts without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


class Gates:
    """The closed gates of one session.

    Attributes:
        closed: the gates by storage, and the two keys that stand for none. It is empty while every storage is simply
            usable: a loop over ops looks at it rather than at the gates, which would cost each op a call.
    """

    def __init__(self, idle: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        """Begin without a closed gate.

        Args:
            idle: entered while something is waited for; whoever waits for us must not wait for our client.
        """
        self._idle = idle
        self.closed: dict[int, list[Gate]] = {}
        self._shrunk: dict[int, tuple[Any, int]] = {}
        """Storages that were made smaller than they had been, and their former bytes."""
        self._indices: WatchedIndices | None = None

    def __bool__(self) -> bool:
        return bool(self.closed)

    @property
    def any_storage(self) -> bool:
        """True if a storage is not simply usable: indices are none of it, which matter to sparse tensors alone."""
        return len(self.closed) > (self._indices is not None)  # other threads may close one meanwhile

    def let_dense_pass(
        self, values: Mapping[int, object], stream: list[Any], at: int, places: Iterable[tuple[int, bool]]
    ) -> bool:
        """Return whether the op at `at` needs no further look: its inputs are dense, and no storage is closed.

        Most ops of a session that has a sparse tensor are such ones, for which `wait_until_usable` takes too long.

        Args:
            values: by slot.
            stream: the commands.
            at: where the op stands.
            places: how far behind it each of its inputs stands, and whether it writes to that one.
        """
        watched = self._indices
        if watched is None or self.any_storage:
            return False
        for offset, is_written in places:
            value = values.get(stream[at + offset])
            if value is None:
                continue
            if type(value) is not torch.Tensor or value.layout is not torch.strided:
                return False
            if is_written and (key := storage_key(value)) is not None:
                watched.note_writes((key,))
        return True

    def hold(self) -> None:
        """Have this count as true, so that the executor looks up after the command that runs now. For any thread."""
        self.closed[_NO_STORAGE] = []

    def let_go(self) -> None:
        """Take `hold` back."""
        self.closed.pop(_NO_STORAGE, None)

    def watch_indices(self) -> None:
        """Look at the indices of sparse tensors from now on, before an op reads them, as often as they were changed."""
        if self._indices is None:
            self._indices = WatchedIndices()
            self.closed[_INDICES] = []

    def note_writes(self, values: Iterable[object]) -> None:
        """Note that something other than an op has written to these values."""
        if self._indices is not None:
            self._indices.note_writes(_keys(_tensors(values)))

    def note_loan(self, values: Iterable[object]) -> None:
        """Note that a function has these values from now on."""
        if self._indices is not None:
            self._indices.note_loan(_keys(_tensors(values)))

    def note_resize(self, tensor: torch.Tensor, former_bytes: int) -> None:
        """The tensor's storage had so many bytes before. PyTorch's kernels would read and write beyond its end."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        assert key is not None
        former = max(former_bytes, self._shrunk.get(key, (None, 0))[1])
        if storage.nbytes() < former:
            self.mark_shrunk(storage, former)
        else:
            self._forget_shrunk(key)

    def note_memory(self, value: torch.Tensor) -> None:
        """The value comes from another session, which may have made its storage too small for it."""
        if parts_of(value) is not None:
            self.watch_indices()
        for part in _parts(value):
            if needed_bytes(part) > part.untyped_storage().nbytes():
                self.note_resize(part, needed_bytes(part))

    def check_size(self, value: object) -> None:
        """Check that storages have room for the tensors that lie in them.

        Raises:
            RuntimeError: the value lies in a storage that was made too small for it.
        """
        if isinstance(value, list | tuple):
            # PyTorch shows a list in the error of an operator that takes none, and so reads what lies in it.
            for item in value:
                self.check_size(item)
        elif isinstance(value, torch.Tensor):
            for part in _parts(value):
                if storage_key(part) in self._shrunk:
                    _check_size(part)

    def empty_without_memory(self, value: object) -> bool:
        """Empty tensors whose sizes reach beyond what their memory is, or was before it was made smaller.

        PyTorch sets the sizes first, then fails to get the memory: whoever reads such a tensor reads the process's
        memory.

        Returns:
            Whether there was one.
        """
        if isinstance(value, list | tuple):
            return sum(map(self.empty_without_memory, value)) > 0  # each of them
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
            return False
        former = self._shrunk.get(storage_key(value) or _NO_STORAGE, (None, 0))[1]
        if needed_bytes(value) <= max(value.untyped_storage().nbytes(), former):
            return False
        value.as_strided_((0,), (1,), 0)
        return True

    def close(self, tensor: torch.Tensor, gate: Gate) -> None:
        key = storage_key(tensor)
        if key is not None:
            gate.storage = tensor.untyped_storage()
            self.closed.setdefault(key, []).append(gate)

    def mark_failed(self, tensor: object, failed: Failed) -> None:
        """The tensor's storage was to be changed by a command that failed; or those of several."""
        if isinstance(tensor, list | tuple):
            for item in tensor:
                self.mark_failed(item, failed)
        elif isinstance(tensor, torch.Tensor):
            for part in _parts(tensor):
                if not self._is_marked(part, failed):
                    self.close(part, Gate(None, failed=failed))

    def _is_marked(self, tensor: torch.Tensor, failed: Failed) -> bool:
        return any(gate.failed is failed for gate in self.closed.get(storage_key(tensor) or _NO_STORAGE, ()))

    def forget_unheld(self) -> None:
        """Forget the marks on storages that nobody but us holds any more."""
        for key, gates in list(self.closed.items()):
            storage = gates[0].storage if gates and all(gate.failed is not None for gate in gates) else None
            if storage is not None and torch._C._storage_Use_Count(storage._cdata) <= OWN_USES:
                del self.closed[key]

    def wait_until_usable(
        self,
        reads: Iterable[object],
        writes: Iterable[object],
        *,
        sizes: bool = True,
        by_one_op: bool = False,
        by_program: bool = False,
        follows_indices: bool = True,
    ) -> None:
        """Waits until these tensors may be used.

        Args:
            reads: what is used.
            writes: those of `reads` that will change.
            sizes: whether they must have the memory that they describe; for views and resizing they need not.
            by_one_op: whether it is one op that reads them and writes to them.
            by_program: whether that op is a program of several.
            follows_indices: whether it may look up what the indices of sparse ones lead to.

        Raises:
            PoisonedError: a change of one of them failed and the client has not been told yet, or its bytes never came.
            RuntimeError: the storage of one of them was made too small for it, or the indices of a sparse one lead
                outside of it.
        """
        reads, writes = list(reads), list(writes)
        if self.any_storage:
            self._wait_for_storages(reads, writes, sizes=sizes, follows_indices=follows_indices)
        # Last: bytes that arrive may be indices, and memory that was taken away is none to look at.
        if self._indices is not None:
            if follows_indices:
                self._check_indices(self._indices, reads, writes, by_one_op, by_program)
            self._indices.note_writes(_keys(_tensors(writes)))

    def _wait_for_storages(
        self, reads: list[object], writes: list[object], *, sizes: bool, follows_indices: bool
    ) -> None:
        if self._shrunk:
            # A list is of no use to a view, and its parts are read for the text of the error. Of a sparse tensor,
            # a view is a computation.
            self.check_size([value for value in reads if sizes or not _is_only_viewed(value, follows_indices)])
        written = set(_keys(writes))
        for key in _keys(reads):
            for gate in list(self.closed.get(key, ())):
                if gate.failed is not None:
                    raise PoisonedError(gate.failed)
                if gate.blocks_reads or key in written:
                    self._open(key, gate)
                    self._wait(gate)

    def _check_indices(
        self, watched: WatchedIndices, reads: list[object], writes: list[object], by_one_op: bool, by_program: bool
    ) -> None:
        sparse = [tensor for tensor in _tensors(reads) if tensor.layout is not torch.strided]
        if sparse:
            known = [*_tensors(writes)] if by_one_op else []
            dense = set(_keys(tensor for tensor in known if tensor.layout is torch.strided))
            values = {key for tensor in known for key in _keys(_parts(tensor)[-1:])}
            for tensor in sparse:
                watched.check(tensor, dense, values)
                if by_program or (by_one_op and len(sparse) > 1):
                    check_distinct(tensor)

    def wait_for_transfers(self) -> None:
        """Waits until all bytes have come and gone."""
        self.open_finished(wait=True)

    def wait_for_arrivals(self) -> None:
        """Wait until all bytes have come; those that never do leave poison behind."""
        self.open_finished()
        for key, gates in list(self.closed.items()):
            for gate in list(gates):
                if gate.finished is not None and gate.blocks_reads:
                    self._open(key, gate)
                    with contextlib.suppress(PoisonedError):
                        self._wait(gate)

    def failed_changes(self) -> list[tuple[torch.UntypedStorage, Failed]]:
        """The storages that should have been changed, each with what failed."""
        return [
            (gate.storage, gate.failed)
            for gates in self.closed.values()
            for gate in gates
            if gate.failed is not None and gate.storage is not None
        ]

    def shrunk(self) -> list[tuple[torch.UntypedStorage, int]]:
        """The storages that were made smaller than they had been, with their former bytes."""
        return list(self._shrunk.values())

    def mark_storage_failed(self, storage: torch.UntypedStorage, failed: Failed) -> None:
        """The storage was to be changed by a command that failed."""
        self.closed.setdefault(int(storage._cdata), []).append(Gate(storage, failed=failed))

    def mark_shrunk(self, storage: torch.UntypedStorage, former_bytes: int) -> None:
        """The storage had so many bytes before."""
        self._shrunk[int(storage._cdata)] = storage, former_bytes
        self.closed[_SHRUNK] = []

    def _forget_shrunk(self, key: int) -> None:
        self._shrunk.pop(key, None)
        if not self._shrunk:
            self.closed.pop(_SHRUNK, None)

    def forget_all(self) -> None:
        """Forget every mark."""
        self.closed.clear()
        self._shrunk.clear()
        self._indices = None

    def open_finished(self, *, wait: bool = False) -> None:
        """Forgets transfers that are over, or, with `wait`, all of them as soon as they are."""
        for key, (storage, _) in list(self._shrunk.items()):
            if torch._C._storage_Use_Count(storage._cdata) <= OWN_USES:
                self._forget_shrunk(key)
        for key, gates in list(self.closed.items()):
            for gate in list(gates):
                if gate.finished is not None and (wait or gate.finished()):
                    self._open(key, gate)
                    # A transfer that failed has poisoned its values.
                    with contextlib.suppress(PoisonedError):
                        self._wait(gate)

    def note_delivery(self, failed: Failed) -> None:
        """The client knows of this failure: what it should have changed is as it was before, and usable again."""
        for key, gates in list(self.closed.items()):
            for gate in list(gates):
                if gate.failed is failed:
                    self._open(key, gate)

    def _wait(self, gate: Gate) -> None:
        assert gate.wait is not None
        if gate.finished is None or gate.finished():
            gate.wait()
            return
        with self._idle():
            gate.wait()

    def _open(self, key: int, gate: Gate) -> None:
        gates = self.closed[key]
        gates.remove(gate)
        if not gates:
            del self.closed[key]


def _own_uses() -> int:
    storage = torch.empty(1).untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


OWN_USES = _own_uses()
"""The reference count of a storage that only we hold."""


def _keys(tensors: Iterable[object]) -> Iterator[int]:
    """The keys of the storages in which tensors lie; a sparse one lies in several."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            for part in _parts(tensor):
                key = storage_key(part)
                if key is not None:
                    yield key


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors whose memory a tensor uses."""
    if tensor.layout is torch.strided:
        return (tensor,)
    parts = parts_of(tensor)
    return () if parts is None else (*parts[0], parts[1])


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_only_viewed(value: object, follows_indices: bool) -> bool:
    """Return whether an op that looks at no values of dense tensors looks at none of this one."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided or not follows_indices
    return not isinstance(value, list | tuple)


def _check_size(tensor: torch.Tensor) -> None:
    needed, there = needed_bytes(tensor), tensor.untyped_storage().nbytes()
    if needed > there:
        raise RuntimeError(
            f"this tensor's storage was resized to {there} bytes, and the tensor needs {needed}. Resize the storage "
            "back before you use the tensor."
        )
