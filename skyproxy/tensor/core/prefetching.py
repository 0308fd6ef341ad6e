"""Values that will be asked for one after another come in blocks: one wait for a block, not one for each.

Saving a checkpoint and moving a module to the CPU ask for many tensors in an order that is known beforehand. Each wait
costs at least the network's delay, so the next ones are asked for while the first is on its way.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from skyproxy.interrupts import shielded
from skyproxy.session.waiters import Waiter
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.torch_codec import byte_count

if TYPE_CHECKING:
    from skyproxy.session.recorder import Recorder
    from skyproxy.session.session import Session
    from skyproxy.tensor.core.devices import Handle

_Place = tuple[weakref.ref[torch.nn.Module], str, str, bool]
"""A module, its table, a name in that, and whether the gradient of what is there is meant."""
_BLOCK_ITEMS = 256
_MOST_PATIENCE = 4096
_BLOCKS_IN_FLIGHT = 2  # the next block is asked for when half of one is taken


class _Reader(threading.local):
    """The values that this thread reads ahead, if any.

    Attributes:
        ahead: what will be asked for for certain.
        guess: what may be: the last state dict of a module, whose values a loop may copy one by one.
        module: the same of the module that was moved last, and of its gradients.
    """

    ahead: ReadingAhead | None = None
    guess: SequentialReads | None = None
    module: SequentialReads | None = None

    def expected_around(self, handle: Handle) -> ReadingAhead | None:
        """Return what has been asked for with this tensor among it; None if nobody expected it now."""
        if self.ahead is not None:
            return self.ahead
        ahead = self.guess.reads_around(handle) if self.guess is not None else None
        if ahead is None and self.module is not None:
            ahead = self.module.reads_around(handle)
        return ahead


READER = _Reader()


@dataclass(slots=True)
class _Asked:
    """A value on its way.

    Attributes:
        handle: the value; kept, so that nothing else can get its id.
        moment: `moment_of` its recorder just before it was asked for.
        first: whether it is the first of its block, whose wait counts.
    """

    handle: Handle
    waiter: Waiter
    moment: tuple[int, int]
    first: bool


class _Storage(Protocol):
    """The part of `SkyStorage` that is used here; that class stands on this module."""

    @property
    def _cdata(self) -> int: ...

    def as_bytes(self) -> RemoteTensor: ...


def moment_of(recorder: Recorder) -> tuple[int, int]:
    """Return what is another pair as soon as something was recorded that may write: ops, and hidden writes.

    A value that was asked for after a moment is right as long as the moment is the same.
    """
    return recorder.ops, recorder.hidden_writes


class ReadingAhead:
    """Asks for the next of a known list of tensors whenever one of them is taken."""

    def __init__(self) -> None:
        self._queue: dict[int, Handle] = {}
        self._asked: dict[int, _Asked] = {}
        self._storages: dict[int, RemoteTensor] = {}
        self._block_size = 0

    def add(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Tensors that will be asked for, in this order; those that are not remote, or not dense, are left out."""
        for tensor in tensors:
            if type(tensor) is RemoteTensor and tensor._sky.meta.layout is torch.strided:
                self._queue.setdefault(id(tensor._sky), tensor._sky)

    def add_storage(self, storage: _Storage) -> None:
        """The same for all bytes of a storage."""
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = whole = storage.as_bytes()
            self.add([whole])

    def bytes_of(self, storage: _Storage) -> RemoteTensor:
        """The tensor of all bytes of a storage that will be taken; a fresh one if it was not added."""
        known = self._storages.get(storage._cdata)
        return known if known is not None else storage.as_bytes()

    def take(self, handle: Handle) -> torch.Tensor | None:
        """The values of a tensor, as `Session.fetch` gives them; None if it was not expected, or may have changed."""
        key = id(handle)
        if key in self._queue:
            self._ask_for_a_block(key)
        asked = self._asked.pop(key, None)
        session = handle.device.session
        if asked is None:
            return None
        if asked.moment != moment_of(session.recorder):
            self._queue.clear()  # this is not plain saving or moving: what is prefetched would be wasted again
            self._asked.clear()
            return None
        if self._queue and len(self._asked) <= self._block_size // 2:
            self._ask_for_a_block(next(iter(self._queue)))
        return session.fetched(asked.waiter, handle.meta.description, counted=asked.first)

    def _ask_for_a_block(self, first: int) -> None:
        """Asks for the tensor with this key and for some that follow."""
        keys, room = [first], SETTINGS.max_in_flight_bytes // _BLOCKS_IN_FLIGHT
        room -= byte_count(self._queue[first].meta.description)
        for key, handle in self._queue.items():
            room -= byte_count(handle.meta.description) if key != first else 0
            if len(keys) == _BLOCK_ITEMS or room < 0:
                break
            if key != first:
                keys.append(key)
        self._block_size = len(keys)
        # What is interrupted before all was sent is asked for anew: nobody waits for an answer whose question stayed.
        asked: dict[int, _Asked] = {}
        sessions: set[Session] = set()
        for key in keys:
            handle = self._queue.pop(key)
            session = handle.device.session
            moment = moment_of(session.recorder)  # before: another thread may record something behind the question
            waiter = session.start_fetch(handle.slot, handle.meta.description, send=False)
            asked[key] = _Asked(handle, waiter, moment, key == first)
            sessions.add(session)
        for session in sessions:
            session.recorder.flush()
        self._asked.update(asked)


class _Tensors(Protocol):
    """Tensors in order, by names of any kind."""

    def items(self) -> Iterable[tuple[Any, Any]]: ...

    def get(self, name: Any, /) -> Any: ...


class ModuleTensors:
    """A module's parameters, their gradients and its buffers, as far as there are any when somebody looks.

    Keeps neither the module nor a tensor alive. Nor does it refer to tensors weakly, for PyTorch swaps none of those.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def items(self) -> Iterator[tuple[_Place, object]]:
        """Each with its place, in the order in which loops go through them."""
        module = self._module()
        parts = [
            (weakref.ref(part), part)
            for part in (module.modules() if module is not None else ())
            if not isinstance(part, torch.jit.ScriptModule)  # whose tables are C++'s, and make each tensor anew
        ]
        for table, of_gradients in (("_parameters", False), ("_parameters", True), ("_buffers", False)):
            for reference, part in parts:
                for name in getattr(part, table):
                    place = reference, table, name, of_gradients
                    yield place, self.get(place)

    def get(self, place: _Place, /) -> object:
        reference, table, name, of_gradients = place
        tensor = getattr(reference(), table, {}).get(name)
        return tensor.grad if of_gradients and tensor is not None and tensor.is_leaf else tensor


class SequentialReads:
    """Tensors that may be copied one after another, in their order: `{k: v.cpu() for k, v in d.items()}`.

    Nothing is asked for before two neighbours were. From then on as many of the next ones are on their way as were
    taken in turn, in number and in bytes: a loop that ends early has asked for about twice what it took.
    """

    def __init__(self, tensors: Callable[[], _Tensors | None], *, change: bool = False) -> None:
        """Expect some tensors.

        Args:
            tensors: gives them; None once they are gone.
            change: whether others come to be among them, so that they are looked through again.
        """
        self._tensors = tensors
        self._names: list[Any] = []
        self._places: dict[int, int] = {}
        self._tied: set[int] = set()
        self._last = -2
        self._change = change
        self._unknown = 0
        self._patience = 1
        self._begin(-2)

    def _begin(self, place: int) -> None:
        """Nothing was taken in turn before this place."""
        self._taken = self._taken_bytes = 0
        self._next = place + 1
        self._ahead: ReadingAhead | None = None
        self._recorded: tuple[Session, tuple[int, int]] | None = None

    def reads_around(self, handle: Handle) -> ReadingAhead | None:
        """Return what has been asked for, this tensor among it; None if it is not its turn."""
        tensors = self._tensors()
        if tensors is None:
            if READER.guess is self:
                READER.guess = None
            return None
        if not self._names and not self._change:
            self._look_through(tensors)
        place = self._places.get(id(handle), -2)
        if self._handle(tensors, place) is not handle:
            if not self._change or not self._is_found_now(handle, tensors):
                return None
            place = self._places[id(handle)]
        if place <= self._last and id(handle) in self._tied:
            return None
        session = handle.device.session
        recorded = (session, moment_of(session.recorder))
        if place != self._last + 1 or recorded != self._recorded:
            self._begin(place)
            self._recorded = recorded
        elif self._ahead is None:
            self._ahead = ReadingAhead()
            self._next = place
        self._last = place
        self._taken += 1
        self._taken_bytes += byte_count(handle.meta.description)
        if self._ahead is not None:
            self._add_some(tensors, self._ahead)
        return self._ahead

    def _is_found_now(self, handle: Handle, tensors: _Tensors) -> bool:
        """Look through the tensors again for one that was not there; the less often, the more often that is in vain."""
        self._unknown += 1
        if self._unknown < self._patience:
            return False
        self._unknown = 0
        before = self._names
        self._names, self._places, self._tied = [], {}, set()
        self._look_through(tensors)
        if self._names[: self._next] != before[: self._next]:
            self._last = -2  # otherwise the loop goes on among tensors of which some are new, as gradients are
        found = id(handle) in self._places
        self._patience = 1 if found else min(4 * self._patience, _MOST_PATIENCE)
        return found

    def _look_through(self, tensors: _Tensors) -> None:
        for name, tensor in tensors.items():
            if type(tensor) is RemoteTensor and tensor._sky.meta.layout is torch.strided:
                if id(tensor._sky) in self._places:
                    self._tied.add(id(tensor._sky))
                    continue
                self._places[id(tensor._sky)] = len(self._names)
                self._names.append(name)

    def _add_some(self, tensors: _Tensors, ahead: ReadingAhead) -> None:
        window = min(self._taken, _BLOCK_ITEMS)
        if self._next == len(self._names) or self._next - self._last - 1 > window // 2:
            return
        room = self._taken_bytes
        for place in range(self._last, min(self._last + window + 1, len(self._names))):
            handle = self._handle(tensors, place)
            if handle is None:
                break
            room -= byte_count(handle.meta.description) if place > self._last else 0
            if room < 0:
                break
            if place >= self._next:
                ahead.add([tensors.get(self._names[place])])
                self._next = place + 1

    def _handle(self, tensors: _Tensors, place: int) -> Handle | None:
        tensor = tensors.get(self._names[place]) if place >= 0 else None
        return tensor._sky if type(tensor) is RemoteTensor else None


@contextlib.contextmanager
@shielded
def reading_ahead(tensors: Iterable[torch.Tensor | None] = ()) -> Iterator[ReadingAhead]:
    """Inside, this thread's downloads of these tensors, and of those that are added, come in blocks.

    Nothing is asked for before the first of them is. A value is what it would have been without: one that an operation
    may have changed meanwhile is asked for anew.
    """
    outer = READER.ahead
    ahead = outer if outer is not None else ReadingAhead()
    ahead.add(tensors)
    READER.ahead = ahead
    try:
        yield ahead
    finally:
        READER.ahead = outer
