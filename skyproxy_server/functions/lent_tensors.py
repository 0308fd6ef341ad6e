"""Tensors that one process of a worker lends to another: storages by shared memory, on GPUs by CUDA IPC.

What is lent is memory, not a pickle: the borrower is told sizes, and lies about nothing that the lender believes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.torch_codec import Description
from skyproxy_server.functions.memory_files import descriptor_of, mapped_storage, shared_storage
from skyproxy_server.gates import OWN_USES, storage_key

logger = logging.getLogger("skyproxy.server")

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LONGEST = 1 << 62
_HANDLE = "_sky_cuda_handle"
"""An attribute of storages: the address and bytes that were shared, and the handle."""


class LentTensors:
    """The tensor arguments of one call, for a process that uses the memory which the session's own tensors lie in.

    Memory of the CPU can be lent where it is that of a file. So what is lent for the first time moves there, with all
    of the session's tensors that share it: one copy, once; its storage cannot be resized from then on. What somebody
    else in this process holds, a function that runs or a global of one, stays where it is: a copy is lent, and copied
    back where the function has changed it. So is memory of a GPU where processes cannot share it.

    Made on the thread of the session's operations, between two of them.

    Attributes:
        tensors: the arguments.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], held: Iterable[object]) -> None:
        """Prepare to lend the tensors of one call.

        Args:
            tensors: the arguments.
            held: all values of the session.

        Raises:
            TypeError: one of them has no memory that could be lent.
            OSError: there is no memory for the move, or too many files are open.
        """
        self.tensors = list(tensors)
        self._copied: dict[int, torch.UntypedStorage] = {}
        self._can_share = True
        self._keys: list[int] = []
        self._own: dict[int, torch.UntypedStorage] = {}
        for tensor in self.tensors:
            key = _key_of(tensor)
            self._own.setdefault(key, tensor.untyped_storage())
            self._keys.append(key)
        self._move(held)

    def _move(self, held: Iterable[object]) -> None:
        wanted = {
            key: storage
            for key, storage in self._own.items()
            if kind_of(storage) == "cpu" and storage.nbytes() and not storage.is_shared()
        }
        if not wanted:
            return
        moved: dict[int, tuple[int, torch.UntypedStorage]] = {}
        holders: dict[int, dict[int, torch.Tensor]] = {key: {} for key in wanted}
        for value in (*held, *self.tensors):
            if isinstance(value, torch.Tensor) and (key := storage_key(value)) in holders:
                holders[key][id(value)] = value
        for key, storage in wanted.items():
            tensors = list(holders[key].values())
            shared = shared_storage(storage.nbytes())
            shared.copy_(storage)
            if torch._C._storage_Use_Count(storage._cdata) == len(tensors) + OWN_USES and all(map(_can_move, tensors)):
                _put_into(tensors, shared)
                # Under its new key: the old storage, and its key, vanish once we have released it.
                new = storage_key(tensors[0])
                assert new is not None
                moved[key] = new, shared
            else:
                self._copied[key] = shared
        self._keys = [moved[key][0] if key in moved else key for key in self._keys]
        self._own = dict(moved.get(key, (key, storage)) for key, storage in self._own.items())

    def describe(self) -> tuple[list[list[object]], list[list[object]], list[int]]:
        """Describe the tensors, so that the borrower makes the same.

        Returns:
            For each storage how to have it, for each tensor its storage and its description, and files to pass on,
            which stay ours.
        """
        numbers = {key: number for number, key in enumerate(self._own)}
        files: list[int] = []
        storages: list[list[object]] = []
        for key, own in self._own.items():
            if not own.nbytes():
                storages.append(["empty", str(own.device)])
            elif kind_of(own) == "cuda" and (handle := self._try_to_share(own)) is not None:
                storages.append(["cuda", handle])
            else:
                kind = "file"
                if kind_of(own) == "cuda":
                    kind, self._copied[key] = "copy", shared_storage(own.nbytes())
                    self._copied[key].copy_(own)
                descriptor = descriptor_of(self._copied.get(key, own))
                assert descriptor is not None  # see `_move`
                files.append(descriptor)
                storages.append([kind, [own.nbytes(), str(own.device)]])
        rows = [
            [numbers[key], torch_codec.encode_description(torch_codec.describe(tensor))]
            for key, tensor in zip(self._keys, self.tensors)
        ]
        return storages, rows, files

    def _try_to_share(self, storage: torch.UntypedStorage) -> list[Any] | None:
        if self._can_share:
            try:
                return handle_of(storage)
            except RuntimeError as error:
                self.lend_copies(str(error))
        return None

    def lend_copies(self, why: str) -> None:
        """Lend copies of what lies on a GPU from now on: its memory cannot be shared."""
        logger.warning("a function's process gets copies of CUDA tensors: their memory cannot be shared: %.300r", why)
        self._can_share = False

    def storage(self, number: object) -> torch.UntypedStorage:
        """Return the session's own storage behind a number of `describe`.

        Raises:
            ProtocolError: there is none.
        """
        own = list(self._own.values())
        if type(number) is not int or not 0 <= number < len(own):
            raise ProtocolError(f"a function's process names its argument {number!r:.40}, which it does not have")
        return own[number]

    def take_back(self, changed: object) -> list[int]:
        """Note that the function has changed these arguments.

        Raises:
            ProtocolError: they are not among its arguments.
        """
        if not isinstance(changed, list) or not all(type(n) is int and 0 <= n < len(self.tensors) for n in changed):
            raise ProtocolError(f"a function's process changed arguments {changed!r:.60}, which it does not have")
        for number in changed:
            key, tensor = self._keys[number], self.tensors[number]
            if key in self._copied:
                self._own[key].copy_(self._copied[key])
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return changed

    def release(self) -> None:
        """The borrower has ended, or there is none: nothing is lent, or kept, any more."""
        # Whatever still refers to this call, such as an error's frames, keeps no memory of its session.
        self.tensors, self._keys = [], []
        self._own.clear()
        self._copied.clear()


def handle_of(storage: torch.UntypedStorage) -> list[Any]:
    """Return how another process has this memory of a GPU, once all that was computed into it is there.

    PyTorch wraps a storage once more with each share, and keeps its memory until that is counted down, which a process
    that crashes never does. So each storage is shared once and counted down at once; whoever lends it holds it.

    Raises:
        RuntimeError: this memory cannot be shared.
    """
    known = vars(storage).get(_HANDLE)
    if known is None or known[:2] != (storage.data_ptr(), storage.nbytes()):  # it may have been resized
        handle = storage._share_cuda_()
        if handle[4] is not None:  # it has memory
            torch.UntypedStorage._release_ipc_counter_cuda(handle[4], handle[5])
        known = (storage.data_ptr(), storage.nbytes(), [*handle[:-1], False])
        vars(storage)[_HANDLE] = known
    # Not by the event of the handle, which is that of the first share.
    torch.cuda.current_stream(storage.device).synchronize()
    return list(known[2])


def kind_of(storage: torch.UntypedStorage) -> str:
    """Return the type of the device that a storage is on."""
    return storage.device.type


def _key_of(tensor: torch.Tensor) -> int:
    key = storage_key(tensor)
    if (
        key is None
        or type(tensor) not in _PLAIN
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.device.type not in ("cpu", "cuda")
    ):
        raise TypeError(
            f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device} has no memory that could be "
            "lent to a process of its own, or by one. Call the function without isolate=True, or let the tensor be "
            "a strided one."
        )
    return key


def check_lendable(tensors: Sequence[torch.Tensor]) -> None:
    """Check that the memory of these can go to another process.

    Raises:
        TypeError: one of them has none.
    """
    for tensor in tensors:
        _key_of(tensor)


def _can_move(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def _put_into(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


class Borrowed:
    """The same tensors in the process that borrows them.

    Args:
        storages, rows: of `LentTensors.describe`.
        files: likewise, in this process; they are closed.

    Attributes:
        tensors: the arguments.
    """

    def __init__(
        self,
        storages: Sequence[Sequence[Any]],
        rows: Sequence[Sequence[Any]],
        files: Sequence[int],
    ) -> None:
        rest = iter(files)
        if any(kind == "cuda" for kind, _ in storages):
            torch.cuda.init()  # opening a handle does not by itself: it ends the process with SIGSEGV
        # Held until the process ends: with the last tensor, CUDA's count of users would go down, which the lender has
        # done already.
        self._copied: dict[int, torch.UntypedStorage] = {}
        self._storages = [self._borrow(number, kind, value, rest) for number, (kind, value) in enumerate(storages)]
        self._places = [int(number) for number, _ in rows]
        self._numbers = {storage._cdata: number for number, storage in enumerate(self._storages)}
        self.tensors = [
            tensor_in(self._storages[number], torch_codec.decode_description(described)) for number, described in rows
        ]

    def _borrow(self, number: int, kind: str, value: Any, files: Iterator[int]) -> torch.UntypedStorage:
        if kind == "cuda":
            return torch.UntypedStorage._new_shared_cuda(*value)
        if kind == "empty":
            return torch.empty(0, dtype=torch.uint8, device=value).untyped_storage()
        descriptor, (size, device) = next(files), value
        try:
            lent = mapped_storage(descriptor, size)
        finally:
            os.close(descriptor)
        if kind == "file":
            return lent
        self._copied[number] = lent
        own = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        own.copy_(lent)
        return own

    def give_back(self, changed: Iterable[int]) -> None:
        """Let the lender see what has changed of these arguments, where it has lent copies."""
        for number in {self._places[argument] for argument in changed} & self._copied.keys():
            self._copied[number].copy_(self._storages[number])

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the lent storage that a tensor lies in; None for another one."""
        key = storage_key(tensor)
        return None if key is None else self._numbers.get(key)


def tensor_in(storage: torch.UntypedStorage, description: Description) -> torch.Tensor:
    """Return a view of a storage.

    Raises:
        ProtocolError: it would reach beyond it, or is none that a storage can have.
    """
    numbers = (*description.size, *description.stride, description.offset)
    fits = description.layout is torch.strided and len(description.size) == len(description.stride)
    if not fits or not all(type(number) is int and 0 <= number < _LONGEST for number in numbers):
        raise ProtocolError(f"a function's process described a tensor that cannot be: {description!r:.100}")
    extent = torch_codec.storage_extent(description.size, description.stride, description.offset)
    if 0 not in description.size and extent * description.dtype.itemsize > storage.nbytes():
        raise ProtocolError("a function's process described a tensor that is larger than its memory")
    with torch.no_grad():
        tensor = torch.empty(0, dtype=description.dtype, device=storage.device)
        if 0 in description.size:
            tensor = torch.empty_strided(
                description.size, description.stride, dtype=description.dtype, device=storage.device
            )
        else:
            tensor.set_(storage, description.offset, description.size, description.stride)
    if description.conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if description.negative else tensor
