"""The exceptions a user of skyproxy can meet.

SkyproxyError
├── ConfigurationError (ValueError)       a setting or argument that cannot work
│   └── UnknownDeviceError (RuntimeError) this process has no sky device of a number
├── ConnectError (ConnectionError)        no session came about
│   ├── AuthenticationError               the worker refused our token
│   ├── VersionMismatchError              client and worker cannot work together
│   ├── SessionHeldError                  another client uses the named session
│   └── WorkerStartError                  the embedded worker did not come up
├── ClusterError (RuntimeError)           a Kubernetes cluster refused a request, or could not be asked
├── SessionLostError (ConnectionError)    the worker is gone, and its tensors with it
├── CaptureError (RuntimeError)           a graph cannot be captured
├── PluginError (RuntimeError)            a plugin of a pool failed; names the plugin and its hook
├── RankErrors (ExceptionGroup)           a task that ran on several ranks failed; those that differ
├── ScriptError (RuntimeError)            a script that torchrun started failed; names the processes
├── UnknownNameError (LookupError)        nothing was put under a name
├── UnknownJobError (LookupError)         there is no job of a name
├── JobFailedError (RuntimeError)         a job ended otherwise than with exit code 0
├── ProtocolError                         the peer broke the rules; that connection is closed
├── UntrustedResultError (TypeError)      a function returned more than plain data, and its worker is not trusted
├── RemoteTraceback                       a worker's traceback, as the cause of what a function raised there
└── RemoteError (RuntimeError)            something failed on the worker
    ├── UnsupportedOpError (NotImplementedError)   the op cannot run on sky
    ├── InferenceMismatchError            the worker's result has other metadata than we announced
    ├── LimitExceededError                a bound of the worker was hit
    ├── SnapshotError                     a snapshot of a session cannot be written, or not be used
    │   └── SnapshotNotNowError           it cannot be taken at this moment
    ├── CancelledOperationError           an interrupt, or `torch.sky.cancel()`, came before the op was begun
    └── RemoteFunctionError               a function raised what cannot be made again here
        └── FunctionCrashedError          the process of an isolated function ended before it

An op that fails on the worker with an exception that PyTorch users know (RuntimeError, IndexError, ValueError,
TypeError, NotImplementedError, torch.OutOfMemoryError, ...) raises a class that is both `RemoteError` and that
exception, so `except` clauses written for local PyTorch keep working; see `remote_error_class`.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TypeVar

from skyproxy.cell_names import with_cell_names

E = TypeVar("E", bound=BaseException)
_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = tuple(os.path.join(_PACKAGES, name, "") for name in ("skyproxy", "skyproxy_server"))


class SkyproxyError(Exception):
    """Base of every exception that skyproxy defines.

    Its text may hold words of a worker, a cluster or a machine: none of them commands the terminal that shows it.
    """

    def __str__(self) -> str:
        return visible(super().__str__())

    def add_note(self, note: str, /) -> None:
        """Add a note, as every exception does; what would command a terminal is shown instead."""
        super().add_note(visible(note))


class ConfigurationError(SkyproxyError, ValueError):
    """A setting or an argument cannot work; says which, why and what would."""


class UnknownDeviceError(ConfigurationError, RuntimeError):
    """A `sky` device that this process does not have; a `RuntimeError`, as PyTorch's own for other devices."""


class ConnectError(SkyproxyError, ConnectionError):
    """No session with a worker came about.

    Attributes:
        code_name: what the worker called the reason, see `CLOSE_CODES`; empty where it said none.
    """

    code_name: str = ""


class AuthenticationError(ConnectError):
    """The worker refused the token."""


class VersionMismatchError(ConnectError):
    """Client and worker cannot work together; names both sides' versions."""


class WorkerStartError(ConnectError):
    """The embedded worker did not come up; carries the end of its output."""


class SessionHeldError(ConnectError):
    """Another client uses the named session. Nothing of it was touched; `take=True` takes it over."""


class UnknownNameError(SkyproxyError, LookupError):
    """Nothing was put under this name in the session; says what was."""


class UnknownJobError(SkyproxyError, LookupError):
    """There is no job of this name on the worker, or it is another token's; says which there are."""


class JobFailedError(SkyproxyError, RuntimeError):
    """A job ended otherwise than with exit code 0; says how, with the end of its log."""


class ClusterError(SkyproxyError, RuntimeError):
    """A Kubernetes cluster refused a request, or could not be asked.

    Attributes:
        status: the HTTP status of its answer; 0 where there was none.
        reason: what the API server calls it, such as "NotFound", or an empty string.
    """

    status: int = 0
    reason: str = ""


class SessionLostError(SkyproxyError, ConnectionError):
    """The connection to the worker ended, and the tensors that lived there are gone.

    Attributes:
        process_ended: whether the worker's process is known to have ended, with all that ran there.
    """

    process_ended: bool = False

    def again(self) -> SessionLostError:
        """Return an error that says the same, for one more caller: it has a traceback of its own."""
        error = SessionLostError(*self.args)
        error.process_ended = self.process_ended
        return error


class ActorDiedError(SessionLostError):
    """The process that an actor lived in is gone, and its state with it.

    Says how it ended, and whether a call makes the actor again.
    """


class CaptureError(SkyproxyError, RuntimeError):
    """An operation that cannot be part of a captured graph, or a capture that cannot begin or end."""


class PluginError(SkyproxyError, RuntimeError):
    """A hook of a pool's plugin failed; names the plugin, the hook and the rank."""


class RankErrors(SkyproxyError, ExceptionGroup[Exception]):
    """A task that ran on several ranks failed.

    Its `exceptions` are those that differ, each with a note that counts the ranks where it was raised: a mistake that
    every rank makes is shown once.

    Attributes:
        by_rank: the exception of every rank that has one.
        first: the rank that failed first; the others were ended because of it.
    """

    by_rank: dict[int, Exception]
    first: int
    _shown: dict[int, Exception]
    """For each rank, the exception that is shown for it."""

    @classmethod
    def of(cls, message: str, by_rank: dict[int, Exception], first: int) -> RankErrors:
        """The group of the exceptions of each rank.

        Args:
            message: what happened, in a line.
            by_rank: not empty.
            first: a key of it.
        """
        ordered = dict(sorted(by_rank.items()))
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(ordered, key=lambda rank: (rank != first, rank)):
            error = ordered[rank]
            alike.setdefault((type(error), text_of(error), str(error.__cause__)), []).append(rank)
        shown: dict[int, Exception] = {}
        for ranks in alike.values():
            if len(ranks) > 1:
                listed = ", ".join(map(str, sorted(ranks)))
                add_note(ordered[ranks[0]], f"The same on {len(ranks)} ranks: {listed}.")
            shown |= dict.fromkeys(ranks, ordered[ranks[0]])
        group = cls(message, [ordered[ranks[0]] for ranks in alike.values()])
        group.by_rank, group.first, group._shown = ordered, first, shown
        return group

    def derive(self, excs: Sequence[Exception]) -> RankErrors:  # type: ignore[override]
        """The part of the group that an `except*` clause chose; it knows its ranks too."""
        chosen = {rank: error for rank, error in self.by_rank.items() if self._shown[rank] in excs}
        first = self.first if self.first in chosen else min(chosen, default=self.first)
        part = RankErrors(self.message, list(excs))
        part.by_rank, part.first, part._shown = chosen, first, self._shown
        return part


def text_of(error: BaseException) -> str:
    """Return what an exception says: some fail at that, too, and the name of their class stands for it."""
    try:
        return str(error)
    except Exception:
        return repr(type(error))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to anybody's exception, also where its class lets nobody set attributes, as frozen dataclasses do."""
    try:
        vars(error).setdefault("__notes__", [])  # which is all that `add_note` would have to set
        error.add_note(note)
    except Exception:  # code of the user's class; the error is what matters
        return


def traceback_text(error: BaseException) -> str:
    """Return a traceback as text, without the frames of skyproxy that led to the user's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def tell_origin(error: E, function: str, traceback: str) -> E:
    """Tell an exception that a function raised it on a worker, with the traceback there as its cause; return it."""
    add_note(error, f"raised by {function} on the worker; its traceback there is above")
    if "device string: sky" in text_of(error):  # PyTorch's refusal of a device that it does not know
        add_note(
            error,
            'A worker knows its own devices, and no "sky". Give the function torch.device("sky:0") as an argument, '
            "which arrives as the worker's own, or use the device of a tensor: x.device.",
        )
    BaseException.__dict__["__cause__"].__set__(error, RemoteTraceback(traceback))  # as `raise ... from` does
    return error


class ScriptError(SkyproxyError, RuntimeError):
    """A script that torchrun started on a node failed; names the processes, the first failure first."""


class ProtocolError(SkyproxyError):
    """The peer sent what the protocol does not allow; that connection was closed, others are unharmed."""


class RemoteError(SkyproxyError, RuntimeError):
    """Something failed on the worker.

    Attributes:
        remote_traceback: the worker's traceback as text, or an empty string. It is printed with the error unless all
            of it is the worker's own code, as where a kernel of PyTorch refused its operands.
        user_line: "file:line in function" that recorded the failing op, or an empty string.
        op: the name of the overload that failed, or an empty string.
    """

    remote_traceback: str = ""
    user_line: str = ""
    op: str = ""


SELF_EXPLAINING = (RemoteError, CaptureError, SessionLostError, ConfigurationError, ConnectError, ClusterError)
"""Errors that name the line to mend, or what to do: skyproxy's own frames would only hide that."""


class UnsupportedOpError(RemoteError, NotImplementedError):
    """The op cannot run on this worker, or not remotely at all."""


class InferenceMismatchError(RemoteError):
    """The worker's result has other sizes or another dtype than the client had announced. Never a silent difference."""


class SnapshotError(RemoteError):
    """A snapshot of a session cannot be written or used; says why, what is still safe, and what to do next."""


class SnapshotNotNowError(SnapshotError):
    """A snapshot cannot be taken at this moment; the session goes on, and a later step is a good one."""


class LimitExceededError(RemoteError):
    """A bound was hit: handles, bytes in flight, sessions or the size of a message."""


class CancelledOperationError(RemoteError):
    """An operation was cancelled before the worker had begun it: by an interrupt, or by `torch.sky.cancel()`."""


class RemoteFunctionError(RemoteError):
    """A function on a worker raised an exception that cannot be made again here; names its type and its text."""


class FunctionCrashedError(RemoteFunctionError):
    """The process of a function that was called with `isolate=True` ended before the function did.

    The message names the signal or the exit status, and the end of what it printed. The session and its tensors are as
    the function left them; the call can be made again, see `skyproxy.Retry`.
    """


class UntrustedResultError(SkyproxyError, TypeError):
    """A function returned what is not plain data, and its worker is not trusted with more: nothing was unpickled.

    Nothing is lost: after `error.call.trust_worker()`, `error.call.result()` gives the result.

    Attributes:
        call: the function's `Call`; None for what is no result of a call.
    """

    call: Any = None


class RemoteTraceback(SkyproxyError):
    """Never raised: it is the `__cause__` of an exception that a function raised on a worker, and its text is the
    traceback there.
    """

    def __str__(self) -> str:
        return "\n" + visible(with_cell_names(self.args[0])) if self.args else ""


CLOSE_CODES = frozenset(
    {
        "done",
        "bad-token",
        "version",
        "protocol",
        "too-large",
        "too-many-sessions",
        "no-such-session",
        "shutdown",
        "idle",
        "crashed",
    }
)
"""Reasons why a connection can end, as both sides name it."""


KERNEL_FAILED = "a kernel failed on the GPU"
"""Words of a worker that says goodbye because it has lost its CUDA context: the next one may do so over the same."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_HALVES = {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
"""Halves of characters, which JSON can hold and no stream can write."""
_TURNS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""Characters that end lines, and that turn the order of the text around them, so that it reads as something else."""
_HIDDEN = _CONTROLS | _HALVES | {code: f"\\u{code:04x}" for code in _TURNS}


def visible(text: object) -> str:
    """Text of a peer without what does more than show: control characters, tabs and line ends aside, and characters
    that turn the order of others are escapes. It can be written to any stream in UTF-8.
    """
    shown = str(text)
    return shown if shown.isprintable() else shown.translate(_HIDDEN)


_OUTPUT_CONTROLS = {code: text for code, text in _CONTROLS.items() if code not in (8, 13)} | _HALVES
_DRAWING = re.compile(r"(\x1b\[(?:[0-9;:]*[A-HJKSTfm]|\?25[hl]))")
"""Colours, and what progress bars move the cursor and clear lines with (ECMA-48)."""


def visible_output(text: str) -> str:
    """Text that a function printed, with what draws left as it is, and every other control character as an escape.

    Colours, carriage returns and the cursor's moves stay. Titles, the clipboard (OSC 52), questions that a terminal
    would answer by typing, and other modes of it do not. Half a sequence is shown as an escape.
    """
    if text.isprintable():
        return text
    parts = _DRAWING.split(text)
    parts[::2] = [part.translate(_OUTPUT_CONTROLS) for part in parts[::2]]
    return "".join(parts)


def say(text: str) -> None:
    """Tell the user of a program, without a warning: filters that make errors of those must not end it for a line."""
    if sys.stderr is not None:
        print(f"skyproxy: {visible(text)}", file=sys.stderr, flush=True)


@functools.cache
def remote_error_class(foreign: type[BaseException]) -> type[RemoteError]:
    """The class for an exception of type `foreign` on the worker: a `RemoteError` that `except foreign` also catches.

    Args:
        foreign: the exception's type as it is known here.

    Returns:
        `RemoteError` itself where `foreign` adds nothing, else a subclass of both, named after `foreign`.
    """
    if issubclass(RemoteError, foreign):
        return RemoteError
    if issubclass(foreign, RemoteError):
        return foreign

    def reduce(self: RemoteError, protocol: object) -> Any:  # the class has no name that pickle could look up
        return _remote_error, (foreign, self.args), self.__dict__

    # Some classes make their text from arguments that only they know (UnicodeDecodeError), or quote it (KeyError).
    body = {
        "__module__": __name__,
        "__doc__": foreign.__doc__,
        "__str__": Exception.__str__,
        "__reduce_ex__": reduce,
    }
    return type("Remote" + foreign.__name__.lstrip("_"), (RemoteError, foreign), body)


def _remote_error(foreign: type[BaseException], args: tuple[object, ...]) -> RemoteError:
    """An error that was pickled."""
    kind = remote_error_class(foreign)  # type: ignore[arg-type]
    error = kind.__new__(kind)
    error.args = args
    return error
