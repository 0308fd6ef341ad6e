"""Memory of a command that failed: poison for its results, a mark on what it should have changed."""

from __future__ import annotations

import traceback
from typing import Any

import torch

CANCELLED = "CancelledOperationError"


class Failed:
    """A command that failed. Stands in the slots of the values that do not exist because of it.

    Attributes:
        record: the error as it travels: "type", "message", "traceback", "op", "sequence", "position".
        delivered: whether the client has been given this error as the answer to a question.
    """

    __slots__ = ("delivered", "record")

    def __init__(self, error: BaseException, op: str, sequence: int, position: int) -> None:
        self.delivered = False
        self.record: dict[str, Any] = {
            "type": type(error).__name__.removeprefix("Remote"),
            "message": str(error) or type(error).__name__,
            "traceback": "".join(traceback.format_exception(error)),
            "op": op,
            "sequence": sequence,
            "position": position,
        }

    @classmethod
    def cancelled(cls, message: str, op: str, sequence: int, position: int) -> Failed:
        """Make what stands for an operation that the client cancelled before it was begun."""
        made = cls.__new__(cls)
        made.delivered = False
        made.record = {
            "type": CANCELLED,
            "message": message,
            "traceback": "",
            "op": op,
            "sequence": sequence,
            "position": position,
        }
        return made

    @classmethod
    def of_record(cls, record: dict[str, Any], *, delivered: bool) -> Failed:
        """Make the failure that had this record."""
        made = cls.__new__(cls)
        made.record, made.delivered = record, delivered
        return made

    @property
    def was_cancelled(self) -> bool:
        """True if the operation did not fail, but was cancelled."""
        return bool(self.record["type"] == CANCELLED)

    def __repr__(self) -> str:
        return f"<failed {self.record['op']}: {self.record['message']:.60}>"


class PoisonedError(Exception):
    """Raised inside the worker where a value is asked for that a failed command should have made."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.record["message"])
        self.failed = failed


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is how PyTorch says that a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
