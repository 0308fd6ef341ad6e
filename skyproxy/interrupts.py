"""Signals and errors that come from outside, kept out of the C++ that cannot carry them.

C++ asks our guard for the type of its devices while it builds and walks the autograd graph, in functions that must not
throw: a Python error there ends the process. Such errors have three sources.

- One is set already, because an op or a hook raised in backward. It is parked, and `run_backward` raises it again.
- Something strikes inside the method that answers: a signal's handler, `PyThreadState_SetAsyncExc`, a tracer. So
  that method has no Python code: `constant_for_cpp` makes it of objects that are implemented in C.
- A signal's handler runs between the look-up of the method and its call, where pybind11 makes a string. So handlers are
  wrapped, all of them, where `signal.signal` sets them; a wrapped one that is called there strikes a moment later.

PyTorch has one more such place of its own: where autograd asks a fake tensor for its device, as happens while a program
is compiled, PyTorch's own Python code answers. A wrapped handler waits there, too, and where modes are switched, see
`context_edges`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]
import _thread
import ctypes
import dis
import operator
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import repeat
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from skyproxy import patching
from skyproxy.context_edges import is_edge

SIGNAL_LOOK_SECONDS = 1.0
"""Seconds between looks for signals in a wait without an end: one that comes between Python's last look and the wait
itself wakes nobody."""
_RETRY_SECONDS = 0.001
_FOREVER = sys.maxsize
_F = TypeVar("_F", bound=Callable[..., object])
_shielded: set[CodeType] = set()


def shielded(function: _F) -> _F:
    """Defer the handlers of signals while this function, or what it calls, runs. For short functions."""
    _shielded.add(function.__code__)
    return function


# --- answers to C++ --------------------------------------------------------------------------------------------------

_error_was_set: Any = (ctypes.c_void_p * 3)()
"""The error that `PyErr_Fetch` took last: type, value and traceback, each an owned reference or null."""

_parked: deque[tuple[int, bytes]] = deque()
"""Errors that were set when C++ asked: the thread, and a copy of `_error_was_set`."""

_answers: list[tuple[repeat[Any], repeat[Any]]] = []
"""For each constant, an iterator that moves with its look-ups, and one that moves with the calls that end them."""

_restore = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 3)(("PyErr_Restore", ctypes.pythonapi))


def constant_for_cpp(answer: object) -> property:
    """Make a method that gives C++ a constant, has no Python frame, and parks the error that is set, if one is.

    Iterators take the place of statements: `next(map(f, *sources))` is a call of `f` on the next of each source, wholly
    in C. The look-up comes first and must take the error away first, since the interpreter lets no call of a C function
    succeed while an error is set.
    """
    fields = [ctypes.byref(_error_was_set, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(3)]
    asked, told = repeat(fields[0], _FOREVER), repeat(answer, _FOREVER)
    tell = partial(next, told)
    copies = zip(iter(_thread.get_ident, None), map(bytes, repeat(_error_was_set)), strict=False)
    nothing: dict[object, object] = {}
    # `append` gives None, and what `nothing` has for it is `tell`.
    tell_after_parking = map(nothing.get, map(_parked.append, copies), repeat(tell))

    class ByErrorType(dict[object, object]):
        __missing__ = staticmethod(partial(next, tell_after_parking))  # not None: there is an error

    choose = ByErrorType({None: tell}).__getitem__
    chosen = map(choose, map(operator.getitem, repeat(_error_was_set), repeat(0)))
    fetch = ctypes.PYFUNCTYPE(partial(next, chosen))(("PyErr_Fetch", ctypes.pythonapi))  # type: ignore[arg-type]
    _answers.append((asked, told))
    return property(partial(next, map(fetch, asked, repeat(fields[1]), repeat(fields[2]))))


def take_parked_error() -> BaseException | None:
    """Take the errors that this thread has parked; give the first of them."""
    first: BaseException | None = None
    if _parked:
        this_thread = _thread.get_ident()
        for entry in [entry for entry in list(_parked) if entry[0] == this_thread]:
            _parked.remove(entry)
            try:
                _restore(*(ctypes.c_void_p * 3).from_buffer_copy(entry[1]))
            except BaseException as error:
                if first is None:
                    trace = error.__traceback__
                    first = error.with_traceback(trace.tb_next if trace is not None else None)
    return first


# --- handlers of signals ---------------------------------------------------------------------------------------------

_DEVICE_OP = "prim.device.default"
_WEAK_COLLECTIONS = ("_weakrefset.py", "weakref.py", os.path.join("torch", "utils", "weak.py"))

deferred: set[tuple[int, int]] = set()
"""The signals that wait to strike again, each with its process: what a fork copies has no thread that would strike."""

_fork: tuple[CodeType, int] | None = None
"""The code and the place in it that is calling `os.fork`. A child keeps it, for what its hooks raise Python drops."""


class DeferringSignalHandler:
    """A handler that never raises where that would end the process or lose a slot, and is `inner` otherwise."""

    __slots__ = ("inner",)

    def __init__(self, inner: Callable[[int, FrameType | None], object]) -> None:
        self.inner = inner

    def __call__(self, number: int, frame: FrameType | None) -> object:
        if not _is_safe(frame):
            _defer(number)
            return None
        try:
            return self.inner(number, frame)
        except BaseException as error:
            error._skyproxy_struck = True  # type: ignore[attr-defined]
            raise


def raised_by_handler(error: BaseException) -> bool:
    """Tell whether the handler of a signal raised this, and not what it struck: `TimeoutError` is an `OSError`."""
    return getattr(error, "_skyproxy_struck", False)


def _is_safe(frame: FrameType | None) -> bool:
    """Tell whether a handler may raise, where this is the frame that the signal found."""
    for asked, told in _answers:
        if operator.length_hint(asked) != operator.length_hint(told):
            return False
    called: FrameType | None = None
    while frame is not None:
        if called is not None and (frame.f_code, frame.f_lasti) == _fork:
            return False
        if frame.f_code in _shielded or is_edge(frame, called, _shielded):
            return False
        if _tells_device_of_fake_tensor(frame) or _forgets_what_died(frame.f_code):
            return False
        called, frame = frame, frame.f_back
    return True


def _tells_device_of_fake_tensor(frame: FrameType) -> bool:
    """Tell whether PyTorch's C++ asks a fake tensor for its device here, perhaps where it must not throw."""
    code = frame.f_code
    if code.co_name in ("__torch_dispatch__", "dispatch") and code.co_filename.endswith("fake_tensor.py"):
        return str(frame.f_locals.get("func")) == _DEVICE_OP
    if code.co_name == "wrapper" and code.co_filename.endswith("_stats.py"):  # it counts the calls of the former
        return _DEVICE_OP in map(str, frame.f_locals.get("args", ())[1:2])
    return False


def _forgets_what_died(code: CodeType) -> bool:
    """Tell whether a collection of weak references forgets one here: what is raised in its callback Python drops.

    A signal that comes while the collector runs, in C, strikes in the first Python code that is called: often in this.
    """
    return code.co_name in ("_remove", "remove") and code.co_filename.endswith(_WEAK_COLLECTIONS)


def _note_fork() -> None:
    """Note where `os.fork` is called: a handler that raises in a hook of the fork would raise for nobody."""
    global _fork
    caller = sys._getframe().f_back
    _fork = (caller.f_code, caller.f_lasti) if caller is not None else None


def _forget_fork() -> None:
    global _fork
    _fork = None


def _defer(number: int) -> None:
    waiting = os.getpid(), number
    if waiting in deferred:
        return
    deferred.add(waiting)
    try:
        _thread.start_new_thread(_strike_again, waiting)
    except RuntimeError:  # the interpreter ends, or the system gives no thread; to raise here would be worse
        deferred.discard(waiting)


def _strike_again(process: int, number: int) -> None:
    time.sleep(_RETRY_SECONDS)
    try:
        deferred.remove((process, number))
    except KeyError:
        return  # it has struck since
    if callable(_signal.getsignal(number)):  # else its default could end the process, which the first strike did not
        if hasattr(signal, "pthread_kill"):
            # A true signal, because it must end waits as well.
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            _thread.interrupt_main(signal.Signals(number))


def _does_nothing(handler: object) -> bool:
    """Tell whether a handler is an empty function, as those of event loops are, which read the wake-up descriptor.

    Such a one never raises; and were it deferred, the loop would read its signal twice.
    """
    if type(handler) is not FunctionType:
        return False
    names = {instruction.opname for instruction in dis.get_instructions(handler)}
    return names <= {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}


def _wrap(handler: object) -> object:
    if not callable(handler) or isinstance(handler, DeferringSignalHandler) or _does_nothing(handler):
        return handler
    return DeferringSignalHandler(handler)


def _unwrap(handler: object) -> object:
    return handler.inner if isinstance(handler, DeferringSignalHandler) else handler


class _WrappingSignals(ModuleType):
    """Python's C module of signals, which `signal.signal` and `signal.getsignal` call; those two see no wrappers."""

    def __init__(self) -> None:
        super().__init__(_signal.__name__, _signal.__doc__)
        for name, value in vars(_signal).items():
            setattr(self, name, value)
        self.signal = self._set
        self.getsignal = self._get

    @staticmethod
    def _set(number: int, handler: object) -> object:
        waiting = os.getpid(), number
        before = _signal.getsignal(number) if waiting in deferred else None
        if isinstance(before, DeferringSignalHandler):
            deferred.discard(waiting)
            before(number, sys._getframe(1))  # it came under this handler, and must not reach the next one
        return _unwrap(_signal.signal(number, _wrap(handler)))

    @staticmethod
    def _get(number: int) -> object:
        return _unwrap(_signal.getsignal(number))


class _WrapOnMainThread:
    """Wraps the handlers that are set already; only the main thread may. C asks for the truth of this, and calls it."""

    done = False

    def __bool__(self) -> bool:
        struck: BaseException | None = None
        for number in range(1, _signal.NSIG):
            try:
                handler = _signal.getsignal(number)
                wrapped = _wrap(handler)
                if wrapped is not handler:
                    _signal.signal(number, wrapped)
            except BaseException as error:  # of a handler that struck meanwhile; the others are still to be wrapped
                struck = error
        self.done = True
        if struck is not None:
            raise struck
        return False  # "no error", as `Py_AddPendingCall` understands it


_wrap_on_main_thread = _WrapOnMainThread()


def _unwrap_all() -> None:
    """Set the handlers of the program itself; on another thread than the main one, those set already stay wrapped."""
    vars(signal)["_signal"] = _signal
    if threading.current_thread() is not threading.main_thread():
        return
    _wrap_on_main_thread.done = False
    for number in range(1, _signal.NSIG):
        handler = _signal.getsignal(number)
        if isinstance(handler, DeferringSignalHandler):
            _signal.signal(number, handler.inner)


def install_signal_guard() -> None:
    """Wrap all handlers of signals, those that are set now and those that will be; idempotent."""
    if not isinstance(vars(signal)["_signal"], _WrappingSignals):
        patching.replace(
            signal,
            "_signal",
            _WrappingSignals(),
            why="a handler that raises where C++ cannot pass an exception on would end the process; it waits a moment",
            test="tests/test_interrupts.py::test_every_handler_is_wrapped_and_programs_see_their_own",
            when=patching.When.FIRST_DEVICE,
            undo=_unwrap_all,
        )
        os.register_at_fork(before=_note_fork, after_in_parent=_forget_fork)
    if _wrap_on_main_thread.done:
        return
    if threading.current_thread() is threading.main_thread():
        bool(_wrap_on_main_thread)
    else:
        add, is_true = ctypes.pythonapi.Py_AddPendingCall, ctypes.pythonapi.PyObject_IsTrue
        add(ctypes.cast(is_true, ctypes.c_void_p), ctypes.py_object(_wrap_on_main_thread))
