"""The hooks of plugins in a worker process: opened once, closed when the pool or the process ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from skyproxy.errors import ConfigurationError, PluginError, text_of
from skyproxy.runtime.calls import current_call
from skyproxy.runtime.instance import POOL_VARIABLE, InstanceInfo, instance_info
from skyproxy.runtime.plugin import Plugin, has_hook, name_of, reporting
from skyproxy.runtime.project_code import PROJECT_CODE

logger = logging.getLogger("skyproxy")

_CLOSE_LOCK_SECONDS = 2.0
_AT_ONCE_SECONDS = 0.4  # twice that is less than a client waits before it kills its worker
_ABORT_SECONDS = 2.0
_WAY_SECONDS = 5.0
"""The time that the hooks of a client without a connection have to be left for those of another pool."""


class Lifecycle:
    """The hooks that plugins hold open in this process, for one job at a time.

    A job is one generation of one pool. Whoever opens the next one closes the one before: after a failure the group is
    formed anew in the same processes.

    Attributes:
        make_way: called with a session, and with those that hold the hooks it needs gone; ends the ones of the same
            client that have no connection, and returns whether there were any.
    """

    def __init__(self) -> None:
        self.make_way: Callable[[str, Collection[str]], bool] = lambda session, holders: False
        self._lock = threading.RLock()
        self._left = threading.Condition(self._lock)
        self._stack = contextlib.ExitStack()
        self._plugins: tuple[Plugin, ...] = ()
        self._info: InstanceInfo | None = None
        self._owners: set[str] = set()
        self._once: set[str] = set()
        self._tasks: dict[str, int] = {}
        self._task_ended = threading.Condition()

    @property
    def job(self) -> str:
        """The job whose hooks are open, or an empty text."""
        return self._info.job if self._info is not None else ""

    def open(self, plugins: Sequence[Plugin], info: InstanceInfo) -> None:
        """Enters the hooks of all plugins, once for a job, however many threads ask for it.

        Raises:
            PluginError: a hook failed; those that were entered before it are left again.
            ConfigurationError: the hooks of another pool are open here.
        """
        with self._lock:
            ours = info.job.rpartition("/")[0]
            if self._holder() not in ("", ours):
                if self.make_way(_owner(), frozenset(self._owners)):
                    self._left.wait_for(lambda: self._holder() in ("", ours), _WAY_SECONDS)
                if (theirs := self._holder()) not in ("", ours):
                    raise ConfigurationError(
                        f"this worker process holds the plugins of pool {theirs!r}, and frameworks know one process "
                        "group a process. End that pool first, or give this one workers of its own. Where its client "
                        "is gone, the worker ends it after SKYPROXY_SESSION_GRACE_SECONDS, and functions that run then "
                        "SKYPROXY_CALL_GRACE_SECONDS later."
                    )
            if self._info is not None and self._info.job == info.job:
                self._owners.add(_owner())
                return
            self._leave()
            self._plugins, self._info, self._owners = tuple(plugins), info, {_owner()}
            _register_exit()
            try:
                # For processes that the tasks start: they see the same topology as the tasks do.
                self._stack.enter_context(environment({POOL_VARIABLE: info.to_json()}))
                for hook in ("around_process", "around_app"):
                    for plugin in plugins:
                        if has_hook(plugin, hook):
                            self._enter(plugin, hook, info)
            except BaseException:
                self._leave()
                raise

    def enter_once(
        self, key: str, info: InstanceInfo, make: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        """Enters a context manager that stays open like a plugin's; the first of several threads does it.

        Args:
            key: names it within the job.
            info: of the job; what an earlier one left open is closed first.
            make: called where nothing of that name is open yet.
        """
        with self._lock:
            if self.job != info.job:
                self.open((), info)
            if key not in self._once:
                _register_exit()
                self._stack.enter_context(make())
                self._once.add(key)

    def _enter(self, plugin: Plugin, hook: str, info: InstanceInfo) -> None:
        where = f", rank {info.rank} of {info.world_size}"
        with reporting(plugin, hook, where):
            manager = getattr(plugin, hook)(info)
            if not hasattr(manager, "__enter__"):
                raise TypeError(
                    f"{hook} must return a context manager, not {type(manager).__name__}. Decorate it with "
                    "@contextlib.contextmanager."
                )
            manager.__enter__()

        def leave(*exc_info: object) -> None:
            with reporting(plugin, hook, where + ", on the way out"):
                manager.__exit__(None, None, None)

        self._stack.push(leave)

    def _holder(self) -> str:
        """The pool whose hooks are open, or an empty text."""
        return self.job.rpartition("/")[0]

    def _leave(self) -> None:
        stack, self._stack = self._stack, contextlib.ExitStack()
        self._plugins, self._info, self._owners = (), None, set()
        self._once.clear()
        try:
            stack.close()
        except Exception:
            # Whoever comes next has not done it, and the rest of the hooks was left all the same.
            logger.exception("a plugin failed on the way out")
        self._left.notify_all()

    def close(self, pool: str | None = None, timeout_seconds: float = -1) -> None:
        """Leaves all hooks, the last one first; nothing where none is open.

        Args:
            pool: only if they are this pool's; any by default.
            timeout_seconds: how long to wait for a thread that is opening or closing; forever by default.
        """
        if not self._lock.acquire(timeout=timeout_seconds):
            logger.warning("plugins are still being set up; the process ends without leaving their hooks")
            return
        try:
            if pool is None or self._holder() in (pool, ""):
                self._leave()
        finally:
            self._lock.release()

    def abandon(self, session: str, calls: Sequence[str] = ()) -> None:
        """Leaves the hooks that a session opened which will not come back, unless another one relies on them.

        Args:
            session: as in `CallContext.session`.
            calls: those of its calls that were cancelled and go on nevertheless; what they wait for is aborted first.
        """
        if calls and self._owners == {session}:
            self.abort(calls, _ABORT_SECONDS)  # without the lock: one of them may hold it
        with self._lock:
            if session in self._owners:
                self._owners.discard(session)
                if not self._owners:
                    logger.info("the client of pool %s is gone: its plugins' hooks are left", self.job)
                    self._leave()

    def abort(self, calls: Sequence[str], timeout_seconds: float) -> dict[str, bool]:
        """Ends what tasks wait for in vain, because another rank failed. Takes no lock: a hook may be what hangs.

        Args:
            calls: the ids of calls that have been cancelled.
            timeout_seconds: how long to wait for them.

        Returns:
            "idle": whether none of them runs any more; "holds": whether anything was open here.
        """
        plugins, info = self._plugins, self._info
        holds = bool(self._once) or any(has_hook(plugin, "around_app") for plugin in plugins)
        if info is not None:
            for plugin in plugins:
                if has_hook(plugin, "abort"):
                    try:
                        plugin.abort(info)
                    except Exception:
                        logger.exception("plugin %r, abort, rank %d", name_of(plugin), info.rank)
        for abort in list(_ABORTS.values()):
            with contextlib.suppress(Exception):
                abort()
        with self._task_ended:
            idle = self._task_ended.wait_for(lambda: not self._tasks.keys() & set(calls), timeout_seconds)
        return {"idle": idle, "holds": holds}

    def run(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """A task of the pool: `function` as the plugins want it called."""
        decorating = [plugin for plugin in reversed(self._plugins) if has_hook(plugin, "decorate")]
        if decorating and not hasattr(function, "__name__"):
            function = _as_function(function)
        for plugin in decorating:
            with reporting(plugin, "decorate"):
                function = plugin.decorate(function)
        with self.running():
            return function(*args, **kwargs)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """The calling task counts as running inside the `with` block."""
        current = current_call()
        return _RunningTask(self, current.id if current is not None else "")

    def task_begins(self, call: str) -> None:
        """A task of a call begins."""
        with self._task_ended:
            self._tasks[call] = self._tasks.get(call, 0) + 1

    def task_ends(self, call: str) -> None:
        """A task of a call has ended."""
        with self._task_ended:
            self._tasks[call] -= 1
            if not self._tasks[call]:
                del self._tasks[call]
            self._task_ended.notify_all()


class _RunningTask(contextlib.AbstractContextManager[None]):
    """A task that runs; a class, because each call enters one, and a generator takes longer."""

    __slots__ = ("_call", "_lifecycle")

    def __init__(self, lifecycle: Lifecycle, call: str) -> None:
        self._lifecycle = lifecycle
        self._call = call

    def __enter__(self) -> None:
        self._lifecycle.task_begins(self._call)

    def __exit__(self, *_: object) -> None:
        self._lifecycle.task_ends(self._call)


LIFECYCLE = Lifecycle()
_ABORTS: dict[str, Callable[[], None]] = {}
_registered = False


def on_abort(key: str, abort: Callable[[], None]) -> None:
    """Register what to call in this process when another rank failed, beside the plugins' own hooks."""
    _ABORTS[key] = abort


def _owner() -> str:
    call = current_call()
    return call.session if call is not None else ""


def _register_exit() -> None:
    global _registered
    if not _registered:
        _registered = True
        # Late, so that it runs before what the frameworks registered when they were imported.
        atexit.register(LIFECYCLE.close, None, _CLOSE_LOCK_SECONDS)


def _as_function(called: Callable[..., object]) -> Callable[..., object]:
    """A callable object, such as a batch of joblib's, as the function that `decorate` hooks may expect."""

    def function(*args: object, **kwargs: object) -> object:
        return called(*args, **kwargs)

    function.__name__ = function.__qualname__ = type(called).__name__
    return function


class Task:
    """A function of a pool on its way to a worker: there it is called as the plugins want it."""

    wraps_function = True

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        # Errors and logs name the function, not its wrapping.
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        return LIFECYCLE.run(self.function, args, kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return Task, (self.function,)


# --- what a pool calls on its workers --------------------------------------------------------------------------------


def open_hooks(plugins: bytes) -> None:
    """Enters the hooks of a pool's plugins in this process, once for each generation of the pool.

    Args:
        plugins: a pickled tuple of them. Pickled apart, so that a class that cannot be loaded here is a PluginError.

    Raises:
        PluginError: a hook failed, or the plugins cannot be loaded here.
    """
    with LIFECYCLE.running():
        try:
            loaded = pickle.loads(plugins)
        except Exception as error:
            text = f"{type(error).__name__}: {text_of(error)}"
            raise PluginError(f"the plugins cannot be loaded on the worker: {text}") from error
        LIFECYCLE.open(loaded, instance_info())


def close_hooks(pool: str) -> None:
    """Leaves the hooks of a pool's plugins in this process."""
    LIFECYCLE.close(pool)


def close_at_once() -> None:
    """Leave all hooks and remove the files that programs have sent, in a process that ends at once.

    On threads: a hook may hang, and what still hangs for 0.4 s each is left.
    """
    for close in (partial(LIFECYCLE.close, None, _AT_ONCE_SECONDS), PROJECT_CODE.close):
        closing = threading.Thread(target=close, name="skyproxy-hooks", daemon=True)
        closing.start()
        closing.join(_AT_ONCE_SECONDS)


def abort_calls(calls: list[str], timeout_seconds: float) -> dict[str, bool]:
    """See `Lifecycle.abort`."""
    return LIFECYCLE.abort(calls, timeout_seconds)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on, all different. Somebody may still be faster than the caller."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("", 0))
            found.append(probe.getsockname()[1])
        return found


def port_for(purpose: str, info: InstanceInfo) -> int:
    """A port on the head for one purpose, the same in all ranks, so that several frameworks can meet at once.

    Args:
        purpose: "torch" has `info.head_port`; "jax" and "coordination" have ports of their own.
        info: of this process.
    """
    call = current_call()
    ports = call.values.get("ports") if call is not None else None
    return int(ports.get(purpose, info.head_port)) if isinstance(ports, dict) else info.head_port


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables of the process inside the `with` block; None takes one away."""
    before = {name: os.environ.get(name) for name in variables}
    _assign(variables)
    try:
        yield
    finally:
        _assign(before)


def _assign(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def wait_in_slices(done: Callable[[float], bool], timeout_seconds: float, slice_seconds: float = 0.5) -> bool:
    """Waits for something that blocks without looking at signals or cancellation, in slices that do.

    Args:
        done: waits up to so many seconds; whether it came about.
        timeout_seconds: for all.
    """
    end = time.monotonic() + timeout_seconds
    while True:
        left = end - time.monotonic()
        if done(max(0.01, min(slice_seconds, left))):
            return True
        if left <= 0:
            return False
