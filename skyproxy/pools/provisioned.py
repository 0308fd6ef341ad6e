"""Functions that bring their own worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.pools.pool import Compute


def provisioned(target: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """`target` without its parameter `node`: each call provisions a worker as `options` say, and takes it away.

    Whoever passes `node=` provisions nothing.

    Raises:
        ConfigurationError: the function has no parameter to take the node.
    """
    if not inspect.isfunction(target):
        raise ConfigurationError(f"@compute(name=...) decorates functions that take a node, not {target!r}.")
    signature = inspect.signature(target)
    if "node" not in signature.parameters:
        raise ConfigurationError(
            f"@compute({', '.join(options)}) on {target.__name__}: it has no parameter `node` to take the worker. "
            "Write "
            f"async def {target.__name__}(node, ...); or use a bare @compute and say where: "
            f"{target.__name__}(...) >> pool."
        )
    others = [parameter for name, parameter in signature.parameters.items() if name != "node"]

    def bound(node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        rest = signature.replace(parameters=others).bind(*args, **kwargs)
        whole = inspect.BoundArguments(signature, type(rest.arguments)())
        for name in signature.parameters:
            if name == "node":
                whole.arguments[name] = node
            elif name in rest.arguments:
                whole.arguments[name] = rest.arguments[name]
        return whole

    wrapper: Any
    if inspect.iscoroutinefunction(target):

        @functools.wraps(target)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            if "node" in kwargs:
                return await target(*args, **kwargs)
            bound(None, args, kwargs)  # a wrong argument should not cost a worker
            async with Compute(**options) as node:
                call = bound(node, args, kwargs)
                return await target(*call.args, **call.kwargs)

    else:

        @functools.wraps(target)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if "node" in kwargs:
                return target(*args, **kwargs)
            bound(None, args, kwargs)
            with Compute(**options) as pool:
                call = bound(pool.nodes[0] if pool.world_size == 1 else pool, args, kwargs)
                return target(*call.args, **call.kwargs)

    wrapper.__signature__ = signature.replace(parameters=others)
    return wrapper  # type: ignore[no-any-return]
