"""The loss of this process's CUDA context: an error of a kernel after which CUDA refuses the process everything.

NVIDIA says so of the errors below: "This leaves the process in an inconsistent state and any further CUDA work will
return the same error. To continue using CUDA, the process must be terminated and relaunched" (CUDA Runtime API,
`cudaError_t`); those of the memory and the links (214, 220) count where the device gives them again. Nothing on the
device can even be read any more, so the sessions of the process are over, and a process that lived on would fail
whoever comes next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from skyproxy.errors import KERNEL_FAILED, text_of
from skyproxy.transport.stream import remaining
from skyproxy_server.failures import Failed, is_out_of_memory

logger = logging.getLogger("skyproxy.server")

FINAL_ERRORS = {
    214: "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable
    220: "uncorrectable NVLink error detected during the execution",  # cudaErrorNvlinkUncorrectable
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",  # cudaErrorContained
    700: "an illegal memory access was encountered",  # cudaErrorIllegalAddress
    702: "the launch timed out and was terminated",  # cudaErrorLaunchTimeout
    710: "device-side assert triggered",  # cudaErrorAssert
    714: "hardware stack error",  # cudaErrorHardwareStackError
    715: "an illegal instruction was encountered",  # cudaErrorIllegalInstruction
    716: "misaligned address",  # cudaErrorMisalignedAddress
    717: "operation not supported on global/shared address space",  # cudaErrorInvalidAddressSpace
    718: "invalid program counter",  # cudaErrorInvalidPc
    719: "unspecified launch failure",  # cudaErrorLaunchFailure
    721: "tensor memory not completely freed",  # cudaErrorTensorMemoryLeak
    810: "the MPS client has been terminated by the server",  # cudaErrorMpsClientTerminated
    911: "an async error has occured in external entity outside of CUDA",  # cudaErrorExternalDevice
}
"""Texts of the errors that leave a process no context, by number: what `cudaGetErrorString` of CUDA 13 says."""
_FINAL = re.compile("|".join(map(re.escape, FINAL_ERRORS.values())))
_OF_A_DEVICE = re.compile(r"CUDA|HIP error|CUBLAS|cuBLAS|CUDNN|cuDNN|CUSOLVER|CUSPARSE|CUFFT|NCCL|Triton Error")
"""Words that are worth a question to the device: libraries call the loss of the context by names of their own."""
_ASSERTION = re.compile(r"Assertion `[^\n]{1,150}?` failed")
"""An assertion of a kernel, as it is written on standard error; longer ones would not fit into a goodbye."""
_READ_BYTES = 64 << 10


class ContextLostError(Exception):
    """A command lost the CUDA context: the session cannot go on. Never a `RuntimeError`, which many catch.

    Attributes:
        failed: the command.
        words: what happened, for people.
    """

    def __init__(self, failed: Failed, words: str) -> None:
        super().__init__(words)
        self.failed = failed
        self.words = words


class CudaContext:
    """The CUDA context of this process, and what becomes of the process without it.

    Attributes:
        is_lost: whether it was lost.
        on_lost: called once, with what happened, by the first thread that notices, and never again; others wait for it.
            None where nothing depends on the context, as in the process of an isolated function.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: Callable[[str], object] | None = None
        self._lock = threading.Lock()

    def explain(self, error: BaseException) -> str:
        """Return what happened if the context is lost with this error; else an empty text.

        The device itself is asked again, and must give such an error a second time: whoever only has the words in an
        exception of his own ends nobody's session.
        """
        text = text_of(error)
        if is_out_of_memory(error) or not _OF_A_DEVICE.search(text) or not torch.cuda.is_initialized():
            return ""
        found = _ask_devices()
        if not found:
            return ""
        said = next(line for line in found.splitlines() if _FINAL.search(line))
        why = f"{said}; {asserted}" if (asserted := _assertion()) else said
        return (
            f"{KERNEL_FAILED} ({why}). After such an error CUDA refuses a process everything, so the "
            "worker's process ends, and what it held on the CPU ends with it"
        )

    def note(self, error: BaseException) -> None:
        """End the process with its sessions if the context is lost with this error."""
        if self.on_lost is not None and (words := self.explain(error)):
            self.lose(words)

    def lose(self, words: str, tell: Callable[[str], object] | None = None) -> None:
        """Take note that the context is lost; in a worker this does not return.

        Args:
            words: what happened.
            tell: called in place of `on_lost`.
        """
        with self._lock:  # two threads notice at once; the second must not let go of what lies on the device
            if self.is_lost:
                return
            self.is_lost = True
            logger.error("the CUDA context of this process is lost: %s", words)
            end = tell or self.on_lost
            if end is not None:
                # On a thread of its own: a function's is interrupted when its client leaves, which is told just now.
                ending = threading.Thread(target=end, args=(words,), name="skyproxy-end", daemon=True)
                ending.start()
                ending.join()


CONTEXT = CudaContext()
"""The context of this process: CUDA has one for all of its threads."""


def raise_if_lost(error: BaseException, failed: Failed) -> None:
    """Raise ContextLostError if the CUDA context is lost with the error of a command."""
    if isinstance(error, ContextLostError):
        raise error
    if words := CONTEXT.explain(error):
        raise ContextLostError(failed, words) from error


class SharingSession(Protocol):
    """A session of the process whose context is lost."""

    def break_off(self, reason: str) -> None:
        """Tell its client that it is lost, and why."""


def break_off(
    sessions: Sequence[SharingSession], origin: SharingSession | None, words: str, timeout_seconds: float
) -> None:
    """Tell the clients of all sessions that these are lost with the context; wait until they know, but not for long.

    Args:
        sessions: all that share the process.
        origin: the one that noticed; None where a function did.
        words: what happened.
        timeout_seconds: the longest wait.
    """
    count = sum(session is not origin for session in sessions)
    what = "another session" if count == 1 else f"{count} other sessions"
    own = f"{words}. {what.capitalize()} shared that process, and may have caused this" if count else words
    who = "a function" if origin is None else "another session"
    theirs = f"{who} of the same process found that {words}. Each that shared it may have caused this"
    deadline = time.monotonic() + timeout_seconds
    closers = []
    for session in sessions:
        reason = own if session is origin else theirs
        closers.append(threading.Thread(target=session.break_off, args=(reason,), name="skyproxy-closer", daemon=True))
        closers[-1].start()
    for closer in closers:
        closer.join(remaining(deadline))


def _ask_devices() -> str:
    """Return the final error that a device gives to whoever waits for it; an empty text if all devices work."""
    for index in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(index):  # it would get a context, which takes memory
            continue
        try:
            torch.cuda.synchronize(index)
        except RuntimeError as error:
            if _FINAL.search(str(error)):
                return str(error)
    return ""


def _assertion() -> str:
    """Return the latest assertion that a kernel wrote of, where standard error is a file; else an empty text.

    That of an embedded worker is one; with others it stands in the worker's log.
    """
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        if stat.S_ISREG(status.st_mode):
            text = os.pread(2, _READ_BYTES, max(status.st_size - _READ_BYTES, 0)).decode(errors="replace")
            return next(iter(_ASSERTION.findall(text)[-1:]), "")
    return ""
