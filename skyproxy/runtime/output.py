"""Decorators that mute what a function writes, for its own task alone."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, TextIO, TypeVar, overload

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.runtime.instance import InstanceInfo, instance_info

F = TypeVar("F", bound=Callable[..., object])
Only = Literal["head"] | Callable[[InstanceInfo], bool]

_MUTED: ContextVar[frozenset[str]] = ContextVar("skyproxy_muted", default=frozenset())
_installing = threading.Lock()
_installed: dict[str, tuple[patching.Patch, int]] = {}
"""By stream, the stand-in in its place, and how many functions need it."""


def muted(stream: str) -> bool:
    """Return whether the running task's "stdout" or "stderr" is muted; a worker's router asks before passing it on."""
    return stream in _MUTED.get()


def stdout(*, only: Only) -> Callable[[F], F]:
    """A decorator: only some processes of a pool print what the function writes to standard output.

    Args:
        only: "head", or a predicate of the `InstanceInfo` of the process.

    Example:
        ```python
        @skyproxy.function
        @skyproxy.stdout(only="head")
        def train() -> None:
            print("shown once")
        ```
    """
    return _filter(("stdout",), only)


def stderr(*, only: Only) -> Callable[[F], F]:
    """The same for standard error.

    Example:
        ```python
        @skyproxy.function
        @skyproxy.stderr(only="head")
        def train() -> None:
            print("shown once", file=sys.stderr)
        ```
    """
    return _filter(("stderr",), only)


@overload
def silent(function: F) -> F: ...
@overload
def silent(function: None = None) -> Callable[[F], F]: ...
def silent(function: F | None = None) -> F | Callable[[F], F]:
    """A decorator, bare or called: nothing that the function prints is shown, on no process.

    Example:
        ```python
        @skyproxy.function
        @skyproxy.silent
        def noisy() -> int:
            print("shown nowhere")
            return 1
        ```
    """
    decorate = _filter(("stdout", "stderr"), _nobody)
    return decorate if function is None else decorate(function)


def _nobody(info: InstanceInfo) -> bool:
    return False


def _filter(streams: tuple[str, ...], only: Only) -> Callable[[F], F]:
    if only != "head" and not callable(only):
        raise ConfigurationError(
            f'only={only!r} is neither "head" nor a predicate such as `lambda info: info.node < 2`.'
        )

    def decorate(function: F) -> F:
        # What @compute made is decorated inside, so that both orders of decorators mean the same.
        rewrap = getattr(function, "__skyproxy_rewrap__", None)
        if rewrap is not None:
            decorated: F = rewrap(decorate)
            return decorated
        return _wrap(function, streams, only)

    return decorate


def _wrap(function: F, streams: tuple[str, ...], only: Only) -> F:
    # The wrappers travel to workers by value. So they name nothing of this module but by import: a context variable
    # cannot be pickled, and must be the worker's own.
    wrapper: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: object, **kwargs: object) -> object:
            from skyproxy.runtime.output import filtering

            with filtering(streams, only):
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> Any:
            from skyproxy.runtime.output import filtered_generator

            # `yield from`, for a generator function must look like one.
            return (yield from filtered_generator(function(*args, **kwargs), streams, only))

    else:

        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> object:
            from skyproxy.runtime.output import filtering

            with filtering(streams, only):
                return function(*args, **kwargs)

    return wrapper  # type: ignore[no-any-return]


@contextlib.contextmanager
def filtering(streams: tuple[str, ...], only: Only) -> Iterator[None]:
    """Mutes `streams` for the running task inside the `with` block, unless `only` chooses this process."""
    info = instance_info()
    if info.is_head if only == "head" else only(info):
        yield
        return
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(_ensure_mutable(stream))
        token = _MUTED.set(_MUTED.get() | frozenset(streams))
        try:
            yield
        finally:
            _MUTED.reset(token)


def filtered_generator(
    generator: Generator[object, object, object], streams: tuple[str, ...], only: Only
) -> Generator[object, object, object]:
    """`generator`, muted while it runs, and not while its consumer does."""
    step: Callable[[], object] = functools.partial(next, generator)
    while True:
        try:
            with filtering(streams, only):
                item = step()
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
            step = functools.partial(generator.send, sent)
        except GeneratorExit:
            with filtering(streams, only):
                generator.close()
            raise
        except BaseException as error:
            step = functools.partial(generator.throw, error)


class _Mutable:
    """A stream that swallows what a muted task writes; it stands in for streams that do not ask `muted` themselves."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        if muted(self._name):
            return len(text)
        return int(self._stream.write(text) or 0)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _install(name: str) -> patching.Patch:
    return patching.replace(
        sys,
        name,
        _Mutable(getattr(sys, name), name),
        why="one task is muted and the others of its process are not",
        test="tests/runtime/test_output.py::test_a_muted_task_does_not_mute_another",
        when=patching.When.QUIET,
    )


@contextlib.contextmanager
def _ensure_mutable(name: str) -> Iterator[None]:
    """Sees to it that `sys.stdout` or `sys.stderr` asks `muted`, as long as somebody needs that."""
    if getattr(getattr(sys, name), "asks_muted", False):  # a worker's router does
        yield
        return
    with _installing:
        patch, users = _installed.get(name, (None, 0))
        if patch is None or getattr(sys, name) is not patch.replacement:
            # Either nobody is at it, or somebody redirected the stream meanwhile (contextlib.redirect_stdout).
            patch, users = _install(name), 0
        _installed[name] = (patch, users + 1)
    try:
        yield
    finally:
        with _installing:
            current, users = _installed.get(name, (None, 0))
            if current is patch:
                if users > 1:
                    _installed[name] = (patch, users - 1)
                else:
                    del _installed[name]
                    patching.undo(patch)
