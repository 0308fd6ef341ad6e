"""`@sky.integrations.torch`: the process group of PyTorch for one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, overload

from skyproxy.plugins.process_group import JOIN_TIMEOUT_SECONDS, abort_process_group, process_group
from skyproxy.runtime import instance_info
from skyproxy.runtime.lifecycle import LIFECYCLE, on_abort

F = TypeVar("F", bound=Callable[..., object])


@overload
def torch(function: F) -> F: ...
@overload
def torch(
    function: None = None, *, backend: str | None = None, join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
) -> Callable[[F], F]: ...
def torch(
    function: F | None = None, *, backend: str | None = None, join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
) -> F | Callable[[F], F]:
    """A decorator, bare or called: on a worker, `torch.distributed` is initialised before the function's body.

    It may stand above or below `@sky.compute`. The process group is joined once in each rank, by whichever task comes
    first, and stays until the pool ends; where a plugin has joined it, nothing is left to do. On a single rank it does
    nothing, so that the same code runs on one node and on many.

    Args:
        function: the function, or what `@sky.compute` made of it.
        backend: as `torch.distributed` names it; by default nccl where CUDA is available, else gloo.
        join_timeout_seconds: how long the ranks wait for one another.

    Example:
        ```python
        @skyproxy.integrations.torch(backend="gloo")
        @skyproxy.function
        def total() -> float:
            ones = torch.ones(1)
            torch.distributed.all_reduce(ones)
            return ones.item()


        print(total() @ pool)  # with two processes: [2.0, 2.0]
        ```
    """

    def decorate(inner: F) -> F:
        rewrap = getattr(inner, "__skyproxy_rewrap__", None)
        if rewrap is not None:
            decorated: F = rewrap(decorate)
            return decorated

        # It travels to workers by value, so it names the initializer by import alone.
        @functools.wraps(inner)
        def wrapper(*args: object, **kwargs: object) -> object:
            from skyproxy.integrations.torch_integration import join

            join(backend, join_timeout_seconds)
            return inner(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate if function is None else decorate(function)


def join(backend: str | None, join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS) -> None:
    """Joins the process group of the calling task's pool, once in this process."""
    info = instance_info()
    if info.world_size < 2:
        return
    on_abort("torch", abort_process_group)
    LIFECYCLE.enter_once("torch", info, lambda: process_group(info, backend, join_timeout_seconds=join_timeout_seconds))
