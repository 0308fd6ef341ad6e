"""Threads for calls: a call has one to itself, and the next call may have the same one where nothing was left in it.

Starting a thread takes longer than a short function does. What belongs to a thread (modes of PyTorch, thread-locals,
tracing, priority) must not go from one call to the next all the same; so a thread is kept only if its state is what it
was when it began, and if its call was short: others gain nothing by it.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch

from skyproxy.protocol.framing import prepare_thread

_MAX_KEPT = 8
_KEPT_SECONDS = 10.0
_SHORT_SECONDS = 0.05
_SMALLEST = sys.float_info.min
_PYTHONS_OWN = frozenset({"Py_Repr"})
"""Entries of a thread's dictionary that Python itself leaves there and finds again."""

_thread_dictionary = ctypes.pythonapi.PyThreadState_GetDict
_thread_dictionary.restype = ctypes.c_void_p  # borrowed: as an object, it would be released by us
_LOCALS_ARE_APART = sys.version_info >= (3, 13)
_own = threading.local()


class CallThreads:
    """The threads of a worker's calls.

    Args:
        clock: tells whether a call was short.
        kept_seconds: how long a thread waits for a next call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept_seconds: float = _KEPT_SECONDS) -> None:
        self._clock = clock
        self._kept_seconds = kept_seconds
        self._lock = threading.Lock()
        self._kept: list[_CallThread] = []
        self._generation = 0

    def start(self, body: Callable[[], object], name: str) -> threading.Thread:
        """Have a thread call `body`, in an empty context, and return that thread.

        Nothing may be raised in it from outside before `body` has begun, or when it has returned.
        """
        with self._lock:
            # The one that was used last: what it needs is in the processor's caches.
            found = self._kept.pop() if self._kept else None
        if found is None:
            found = _CallThread(self, name)
            found.jobs.put((body, name))
            found.thread.start()
        else:
            found.jobs.put((body, name))
        return found.thread

    def serve(self, thread: _CallThread) -> None:
        """Call what a thread is given, until it must end; on that thread."""
        process, generation = os.getpid(), self._generation
        prepare_thread()  # or the first result would seem to have left something
        watcher = _find_watcher()
        before = _State(watcher)
        while (job := self._next_job(thread)) is not None:
            body, thread.thread.name = job
            del job
            began_at = self._clock()
            contextvars.Context().run(body)
            del body  # else the call would live until the next
            if os.getpid() != process:
                return  # a function forked, and this is what its child has of all threads
            took = self._clock() - began_at
            after = _State(watcher)
            if after.threads != before.threads:
                self._forget_all()  # new threads begin with the new number, and so must the next call
            if after != before or took > _SHORT_SECONDS or torch.cuda.is_initialized():
                return  # of CUDA's state of a thread, its device and streams, nothing is compared
            if not self._keep(thread, generation):
                return

    def _next_job(self, thread: _CallThread) -> tuple[Callable[[], object], str] | None:
        try:
            return thread.jobs.get(timeout=self._kept_seconds)
        except queue.Empty:
            pass
        with self._lock:
            if thread in self._kept:
                self._kept.remove(thread)
                return None
        return thread.jobs.get()  # or None: it was taken for a call, or told to end, a moment ago

    def _keep(self, thread: _CallThread, generation: int) -> bool:
        """Return whether a thread may wait for a next call."""
        thread.thread.name = "skyproxy-call-idle"
        with self._lock:
            if generation != self._generation or len(self._kept) >= _MAX_KEPT:
                return False
            self._kept.append(thread)
            return True

    def _forget_all(self) -> None:
        with self._lock:
            self._generation += 1
            forgotten, self._kept = self._kept, []
        for thread in forgotten:
            thread.jobs.put(None)


class _CallThread:
    """A thread, and what it is given."""

    def __init__(self, owner: CallThreads, name: str) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], object], str] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=owner.serve, args=(self,), name=name, daemon=True)


class _State:
    """State of the calling thread that a function can set.

    Attributes:
        threads: the number that PyTorch computes with.

    Args:
        watcher: what `_find_watcher` found in this thread.
    """

    def __init__(self, watcher: weakref.ref[object] | None) -> None:
        native = torch._C
        self.threads = torch.get_num_threads()
        self._others = (
            torch.is_grad_enabled(),
            # The modes of autocast, inference, functorch and tracing have their bits in these.
            native._dispatch_tls_local_include_set().raw_repr(),
            native._dispatch_tls_local_exclude_set().raw_repr(),
            native._len_torch_function_stack(),
            native._len_torch_dispatch_stack(),
            native._is_multithreading_enabled(),
            native._autograd._profiler_enabled(),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            _SMALLEST * 0.5 == 0.0,  # denormal numbers are flushed
            sys.gettrace(),
            sys.getprofile(),
            sys.get_asyncgen_hooks(),
            sys.get_coroutine_origin_tracking_depth(),
            signal.pthread_sigmask(signal.SIG_BLOCK, ()) if hasattr(signal, "pthread_sigmask") else None,
            os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else None,
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
            _thread_locals(),
            _count_locals(watcher) if _LOCALS_ARE_APART else None,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self.threads == other.threads and self._others == other._others

    __hash__ = None  # type: ignore[assignment]


def _thread_locals() -> frozenset[object]:
    """Return the thread-local variables that have a value in this thread, by the names that Python gives them."""
    address = _thread_dictionary()
    if not address:
        return frozenset()
    return frozenset(ctypes.cast(address, ctypes.py_object).value) - _PYTHONS_OWN


def _find_watcher() -> weakref.ref[object] | None:
    """Return the reference by which a thread-local variable learns of the end of this thread; None: of no use, or none.

    From Python 3.13 on, values of such variables are no entries of the thread's dictionary. All of them watch one
    object of the thread, which nothing else refers to weakly. To be called once in a thread.
    """
    if not _LOCALS_ARE_APART:
        return None
    known = _watchers()  # held, so that none of the new ones gets the place of one of these
    _own.is_watching = True
    places = set(map(id, known))
    found = [each for each in _watchers() if id(each) not in places]
    return found[0] if len(found) == 1 else None  # two threads may do this at once, and are not kept then


def _watchers() -> list[weakref.ref[object]]:
    """Return the references by which `_own` learns of the ends of threads that have a value of it."""
    return [each for part in gc.get_referents(_own) if isinstance(part, set) for each in list(part)]


def _count_locals(watcher: weakref.ref[object] | None) -> object:
    """Count the thread-local variables that have a value in this thread; what equals nothing where that is unknown."""
    return weakref.getweakrefcount(watcher()) if watcher is not None else object()
