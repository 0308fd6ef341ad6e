"""One call of a pool: what is called, where, for how long, and when it is made once more."""

from __future__ import annotations

import inspect
import math
import numbers
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from skyproxy.errors import ConfigurationError, SessionLostError

Callback = TypeVar("Callback", bound=Callable[..., object])
On = int | Literal["head"] | None
_YIELDS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Retry:
    """The conditions under which a call is made once more. It may run twice then, so it must be idempotent.

    Attributes:
        times: how often at most, after the first.
        on: for which exceptions; by default where the worker was lost.
        backoff_seconds: the pause before the first one; every further pause is twice as long.

    Example:
        ```python
        @skyproxy.function(retry=skyproxy.Retry(times=2, backoff_seconds=1.0))
        def evaluate(path: str) -> float:
            return float(len(path))
        ```
    """

    times: int = 1
    on: tuple[type[BaseException], ...] = (SessionLostError,)
    backoff_seconds: float = 0.1

    def __post_init__(self) -> None:
        """Look whether it can be meant: a mistake would show only where a call fails, in place of what failed.

        Raises:
            ConfigurationError: it cannot.
        """
        if type(self.times) is not int or self.times < 0:
            raise ConfigurationError(f"Retry(times={self.times!r:.80}): use 0 or more.")
        pause: object = self.backoff_seconds
        if not _is_number(pause) or not 0 <= self.backoff_seconds < math.inf:
            raise ConfigurationError(f"Retry(backoff_seconds={pause!r:.80}): use a number of seconds, 0 or more.")
        try:
            isinstance(None, self.on)
        except TypeError:
            raise ConfigurationError(
                f"Retry(on={self.on!r:.80}): use a tuple of classes of exceptions, such as on=(OSError,)."
            ) from None

    @classmethod
    def parse(cls, given: Retry | int | None) -> Retry | None:
        """Return what a user meant: a number of times, or an object.

        Example:
            ```python
            assert skyproxy.Retry.parse(2) == skyproxy.Retry(times=2)
            ```
        """
        if given is None or isinstance(given, Retry):
            return given
        if type(given) is not int or given < 0:
            raise ConfigurationError(f"retry={given!r:.80} is no number of times. Use 0 or more, or a Retry.")
        return cls(given) if given else None


@dataclass(frozen=True)
class CallOptions:
    """Options of a call.

    Attributes:
        timeout_seconds: how long it may run; forever by default.
        on: the rank that must run it: a number, or "head" for rank 0; any by default.
        remote: whether tensors in the result stay on the worker.
        retry: when it is made once more; the pool's rule by default.
        isolate: whether it runs in a process of its own; as the settings say by default.
        max_restarts: how often all ranks of a broadcast begin again where one of them has failed.
        debug: whether its breakpoints wait; as the settings say by default.
    """

    timeout_seconds: float | None = None
    on: On = None
    remote: bool = False
    retry: Retry | None = None
    isolate: bool | None = None
    max_restarts: int = 0
    debug: bool | None = None

    @property
    def rank(self) -> int | None:
        """The rank of `on`."""
        return 0 if self.on == "head" else self.on


class CallSpec(Protocol):
    """A call as the place that makes it sees it."""

    @property
    def function(self) -> Callable[..., object]:
        """The function to call."""

    @property
    def args(self) -> tuple[object, ...]:
        """Its positional arguments."""

    @property
    def kwargs(self) -> Mapping[str, object]:
        """Its arguments by name."""

    @property
    def options(self) -> CallOptions:
        """Its options."""

    @property
    def name(self) -> str:
        """The function's name, for people."""


def checked_rank(rank: object) -> On:
    """`rank`, if it is one.

    Raises:
        ConfigurationError: it is neither a number from 0 nor "head".
    """
    if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0):
        return rank
    if rank == "head":
        return "head"
    raise ConfigurationError(f"on={rank!r} is not a rank. Use 0 or more, or 'head'.")


def _is_number(given: object) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, bool)


def checked_timeout(given: float | None) -> float | None:
    """Return the timeout of a call in seconds, if it is one; None, for none, is one, too.

    Raises:
        ConfigurationError: it is neither None nor a number above 0.
    """
    if given is None:
        return None
    if not _is_number(given) or not given > 0:
        raise ConfigurationError(f"timeout={given!r:.80}: a call needs some time. Use a number of seconds above 0.")
    return float(given)


def checked_flag(name: str, given: bool | None) -> bool | None:
    """Return what is to be so or not, if it says that; None where that is left open.

    Raises:
        ConfigurationError: it is something else, which would count as true.
    """
    if given is not None and not isinstance(given, bool):
        raise ConfigurationError(f"{name}={given!r:.80}: use True or False.")
    return given


def checked_callback(name: str, given: Callback | None) -> Callback | None:
    """Return a function to be called later, if it is one, or None.

    Raises:
        ConfigurationError: it cannot be called.
    """
    if given is not None and not callable(given):
        raise ConfigurationError(f"{name}={given!r:.80} cannot be called. Give a function.")
    return given


def checked_restarts(count: object) -> int:
    """`count`, if it is a number of restarts.

    Raises:
        ConfigurationError: it is not.
    """
    if type(count) is not int or count < 0:
        raise ConfigurationError(f"max_restarts={count!r}: use 0 or more.")
    return count


def refuse_restarts(call: CallSpec) -> None:
    """Refuse restarts of a call on one process: only calls on all ranks have them."""
    if call.options.max_restarts:
        raise ConfigurationError(
            f"{call.name} has max_restarts, for `@`: all ranks begin again. For a call on one process, use "
            "with_retry()."
        )


def is_stream(function: Callable[..., object]) -> bool:
    """Return whether calling the function gives values one by one."""
    function = getattr(function, "__skyproxy_function__", function)  # of an actor's method
    if type(function) is types.FunctionType:  # the same answer, in a tenth of the time
        return bool(function.__code__.co_flags & _YIELDS)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
