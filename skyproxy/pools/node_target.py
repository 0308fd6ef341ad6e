"""A connected node as a place for calls, without a pool around it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ConfigurationError
from skyproxy.functions.payload import Payload
from skyproxy.pools.call_options import CallSpec, refuse_restarts
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.tasks import as_task

if TYPE_CHECKING:
    from skyproxy.functions.call import Call
    from skyproxy.node import Node

POOL_OF_NODE: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
"""The pools that run, by their nodes: a call on such a node goes through its pool, with its plugins and its queue."""


class NodeTarget:
    """Makes calls on one node. Its first and only rank is 0."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def submit_call(self, call: CallSpec) -> PoolFuture[Any]:
        """Makes the call."""
        future: PoolFuture[object] = PoolFuture(call.name)
        future.follow(self._start(call))
        return future

    def broadcast_call(self, call: CallSpec) -> PoolFuture[list[Any]]:
        """Makes the call; the list has one result."""
        future: PoolFuture[list[object]] = PoolFuture(call.name)
        running = self._start(call)
        future.on_cancel(running.cancel)

        def ended(done: Call) -> None:
            if done.cancelled():
                future.cancel()
            elif (error := done.exception()) is not None:
                future.fail(error)
            else:
                future.settle([done.result()])

        running.add_done_callback(ended)
        return future

    def stream_call(self, call: CallSpec) -> Iterator[object]:
        """Makes the call, and gives what it yields."""
        return iter(self._start(call))

    def _start(self, call: CallSpec) -> Any:
        options = call.options
        refuse_restarts(call)
        if options.rank not in (None, 0):
            raise ConfigurationError(f"{call.name} is to run on rank {options.rank}, and a node has rank 0 only.")
        # As a payload: the function's own arguments may have the names of options.
        return self._node.submit_payload(
            Payload.of(as_task(call.function), call.args, call.kwargs),
            timeout=options.timeout_seconds,
            name=call.name,
            results="remote" if options.remote else "value",
            isolate=bool(options.isolate),
        )
