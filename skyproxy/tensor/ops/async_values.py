"""Values that were asked for and have not been waited for: the way to log a loss every step without a wait a step."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.transfers import start_download


class PendingTensor:
    """The values that a tensor had when it was asked for, on their way here.

    Await it, or call `result()`; later changes of the tensor do not change it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._finish, self._done = start_download(tensor.detach())
        self._value: torch.Tensor | None = None

    def done(self) -> bool:
        """Return whether the values are here, so that `result()` does not wait."""
        return self._value is not None or self._done()

    def result(self) -> Any:
        """The values as a CPU tensor; waits if they are not here yet.

        Raises:
            RemoteError: the operation that should have made them failed.
            SessionLostError: the worker is gone.
        """
        return self._tensor()

    def _tensor(self) -> torch.Tensor:
        if self._value is None:
            self._value = self._finish()
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        if self.done():
            return self.result()
        return (yield from asyncio.get_running_loop().run_in_executor(None, self.result).__await__())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.result()!r}>" if self.done() else f"<{type(self).__name__} on its way>"


class PendingScalar(PendingTensor):
    """A number on its way here; see `PendingTensor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.numel() != 1:
            raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
        super().__init__(tensor)

    def result(self) -> Any:
        """The number, as `Tensor.item()` gives it; waits if it is not here yet."""
        return self._tensor().item()

    def __float__(self) -> float:
        return float(self.result())

    def __format__(self, spec: str) -> str:
        return format(self.result(), spec)


def prefetch(*tensors: torch.Tensor) -> list[PendingTensor]:
    """Asks for the values of tensors, all in one go, and does not wait.

    Args:
        tensors: remote tensors; those of the CPU are simply there.

    Returns:
        One pending value for each, in order: the values as they are at this point of the program.

    Example:
        ```python
        loss = torch.ones(8, device="sky:0").mean()
        (value,) = skyproxy.prefetch(loss)  # asked for, not waited for
        print(value.result().item())
        ```

    Raises:
        TypeError: one is no tensor.
    """
    for value in tensors:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"prefetch() takes tensors, not {type(value).__name__}: skyproxy.prefetch(loss, accuracy)")
    return [PendingTensor(tensor) for tensor in tensors]


def item_async(self: RemoteTensor) -> PendingScalar:
    """`item()` without the wait: a number on its way, to be awaited, or asked for its `result()` later.

    Example:
        ```python
        loss = torch.ones(3, device="sky:0").sum().item_async()
        print(loss.result())  # in an async function: await loss
        ```
    """
    return PendingScalar(self)


def install() -> None:
    """Gives remote tensors their `item_async`."""
    RemoteTensor.item_async = item_async  # type: ignore[attr-defined]
