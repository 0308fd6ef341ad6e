"""Keeps the random numbers of one session apart from those of the others in this process.

Ops without a generator argument draw from the process's default generators. Those belong to one session at a time;
when another session's op draws, the states are exchanged first.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator

import torch

from skyproxy.protocol.commands import Handler
from skyproxy_server.devices import WorkerDevices

_CPU_STATE = struct.Struct("=QiiQ")
"""The beginning of the CPU generator's state: seed, numbers left, whether it is seeded, the next one's place."""
_CPU_NUMBERS = 624
"""The numbers of the Mersenne twister, from the paper that it comes from."""

_lock = threading.RLock()
_owner: RandomState | None = None


class RandomState:
    """The default generators of one session, one a device."""

    def __init__(self, devices: WorkerDevices) -> None:
        self._rows = devices
        self._states: dict[tuple[str, int], torch.Tensor] = {}

    def guard(self, handler: Handler) -> Handler:
        """A handler that draws from this session's numbers."""

        def draw(values: dict[int, object], stream: list[object], position: int) -> int:
            with _lock:
                if _owner is not self:
                    self._take_over()
                return handler(values, stream, position)

        return draw

    def _devices(self) -> list[tuple[str, int]]:
        return [(row["type"], row["index"] or 0) for row in self._rows]

    def take_over(self) -> None:
        """Make the default generators draw from this session's numbers from now on."""
        with _lock:
            if _owner is not self:
                self._take_over()

    def _take_over(self) -> None:
        global _owner
        if _owner is not None:
            _owner._states = {key: _generator(*key).get_state() for key in _owner._devices()}
        _owner = self
        for key in self._devices():
            state = self._states.get(key)
            if state is not None:
                _generator(*key).set_state(state)
            else:
                _generator(*key).manual_seed(torch.initial_seed())

    def generator(self, kind: str, index: int | None) -> torch.Generator:
        """The default generator of a device, holding this session's state. Call with `exclusive()` held."""
        if _owner is not self:
            self._take_over()
        return _generator(kind, index or 0)

    def states(self) -> dict[tuple[str, int], torch.Tensor]:
        """The states of the default generators that this session draws from, by device: kind and number."""
        with _lock:
            if _owner is not self:
                return dict(self._states)
            return {key: _generator(*key).get_state() for key in self._devices()}

    def move_on(self, before: dict[tuple[str, int], torch.Tensor], after: dict[tuple[str, int], torch.Tensor]) -> None:
        """Let this session draw from `after` from now on, on devices where it has not drawn since `before`."""
        with _lock:
            now = self.states()
            for key in now.keys() & before.keys() & after.keys():
                if torch.equal(now[key], before[key]) and not torch.equal(after[key], before[key]):
                    set_state(torch.Generator(key[0]), after[key])
                    self._states[key] = after[key]
                    if _owner is self:
                        _generator(*key).set_state(after[key])

    @staticmethod
    def exclusive() -> threading.RLock:
        """The lock that keeps other sessions from the default generators."""
        return _lock

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Let other sessions draw during the block, in which this one waits for its client, if it was about to draw."""
        if not _lock._is_owned():  # type: ignore[attr-defined]
            yield
            return
        saved = _lock._release_save()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            _lock._acquire_restore(saved)  # type: ignore[attr-defined]
            if _owner is not self:
                self._take_over()

    def forget(self) -> None:
        """The session is over."""
        global _owner
        with _lock:
            if _owner is self:
                _owner = None


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Give a generator a state that somebody else has sent.

    PyTorch checks its size and how many numbers are left, but not that so many follow the next one: with others, the
    generator would draw from the memory behind its own.

    Raises:
        RuntimeError: no generator has such a state.
    """
    if generator.device.type == "cpu":
        data = state.numpy().tobytes()
        _, left, _, place = _CPU_STATE.unpack_from(data.ljust(_CPU_STATE.size, b"\0"))
        if left + place > _CPU_NUMBERS + 1:
            raise RuntimeError(f"no random generator has {left:,} numbers left behind the one at {place:,}")
    generator.set_state(state)


def _generator(kind: str, index: int) -> torch.Generator:
    if kind == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[index]
