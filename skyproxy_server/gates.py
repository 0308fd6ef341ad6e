"""Storages that are not simply usable: bytes still arriving, bytes still leaving, or a change that failed.

While any gate is closed, the executor looks at the storages of every op; otherwise it looks at none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from skyproxy_server.failures import Failed, PoisonedError


@dataclass(slots=True)
class Gate:
    """Why a storage is not simply usable.

    Attributes:
        storage: kept alive, so that its address stays its own.
        finished: whether the transfer is over; None for a failed change.
        wait: waits for the transfer; raises PoisonedError if it failed.
        blocks_reads: whether readers must wait too, or writers only.
        failed: the command that should have changed the storage.
    """

    storage: Any
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
    """The closed gates of one session, by storage."""

    def __init__(self) -> None:
        self._closed: dict[int, list[Gate]] = {}

    def __bool__(self) -> bool:
        return bool(self._closed)

    def close(self, tensor: torch.Tensor, gate: Gate) -> None:
        key = storage_key(tensor)
        if key is not None:
            gate.storage = tensor.untyped_storage()
            self._closed.setdefault(key, []).append(gate)

    def mark_failed(self, tensor: Any, failed: Failed) -> None:
        """The tensor's storage was to be changed by a command that failed."""
        if isinstance(tensor, torch.Tensor):
            self.close(tensor, Gate(None, failed=failed))

    def pass_through(self, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Waits until these tensors may be used.

        Args:
            reads: what is used.
            writes: those of `reads` that will change.

        Raises:
            PoisonedError: a change of one of them failed and the client has not been told yet, or its bytes never came.
        """
        written = {storage_key(tensor) for tensor in writes if isinstance(tensor, torch.Tensor)}
        for tensor in reads:
            if not isinstance(tensor, torch.Tensor):
                continue
            key = storage_key(tensor)
            if key is None or key not in self._closed:
                continue
            for gate in list(self._closed[key]):
                if gate.failed is not None:
                    raise PoisonedError(gate.failed)
                if gate.blocks_reads or key in written:
                    assert gate.wait is not None
                    self._open(key, gate)
                    gate.wait()

    def wait_for_transfers(self) -> None:
        """Waits until all bytes have come and gone."""
        self.open_finished(wait=True)

    def open_finished(self, *, wait: bool = False) -> None:
        """Forgets transfers that are over, or, with `wait`, all of them as soon as they are."""
        for key, gates in list(self._closed.items()):
            for gate in list(gates):
                if gate.finished is not None and (wait or gate.finished()):
                    assert gate.wait is not None
                    self._open(key, gate)
                    # A transfer that failed has left poison behind for those who want its values.
                    with contextlib.suppress(PoisonedError):
                        gate.wait()

    def delivered(self, failed: Failed) -> None:
        """The client knows of this failure: what it should have changed is as it was before, and usable again."""
        for key, gates in list(self._closed.items()):
            for gate in list(gates):
                if gate.failed is failed:
                    self._open(key, gate)

    def _open(self, key: int, gate: Gate) -> None:
        gates = self._closed[key]
        gates.remove(gate)
        if not gates:
            del self._closed[key]
