"""The queue of the calls that run on all processes of a pool, one at a time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from skyproxy.errors import ConfigurationError, SkyproxyError
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.output_view import TaskOutput
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.pool_task import closed_error
from skyproxy.pools.restarting import Restarting, remove_checkpoints
from skyproxy.pools.sending import begin_on_all
from skyproxy.pools.slots import ProcessSlots, Slot
from skyproxy.pools.tasks import as_task

if TYPE_CHECKING:
    from concurrent.futures import Future

    from skyproxy.functions import Payload
    from skyproxy.functions.call import Call
    from skyproxy.functions.payload_file import PassedPayload, PayloadFile
    from skyproxy.node import Node


class Crew(Protocol):
    """The processes that take part in a broadcast, formed into a group; counted from 0 as they see it themselves."""

    @property
    def members(self) -> Mapping[int, Node]:
        """The connections."""

    @property
    def addresses(self) -> Mapping[int, str]:
        """Those by which they reach one another, by rank."""

    def context(self, rank: int) -> dict[str, object]:
        """Return what goes beside a call."""

    def gather(self, calls: Mapping[int, Call], timeout_seconds: float | None, what: str) -> Future[list[object]]:
        """The results of calls, in the order of ranks."""


class CallableGroup(Protocol):
    """The processes of a pool, as its queues need them."""

    @property
    def members(self) -> Mapping[int, Node]:
        """The connections to the processes that are there, by rank."""

    def crew(self, ranks: Sequence[int]) -> Crew:
        """Return those of these ranks that are there, formed into a group."""

    def task(self, function: Callable[..., object]) -> Callable[..., object]:
        """The function as it goes to the processes."""


class Broadcasts:
    """Calls on all processes that are there when they begin. The next one begins when one has ended."""

    def __init__(
        self,
        group: CallableGroup,
        slots: ProcessSlots,
        lock: contextlib.AbstractContextManager[object],
        wake: Callable[[], object],
    ) -> None:
        """Make the broadcasts of one scheduler.

        Args:
            group: the processes.
            slots: the same, as their scheduler sees them.
            lock: the scheduler's.
            wake: has the scheduler look for the next call; called with the lock.
        """
        self._group = group
        self._slots = slots
        self._lock = lock
        self._wake = wake
        self._waiting: deque[tuple[PoolFuture[list[object]], Callable[[], None]]] = deque()
        self._is_running = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, call: PendingCompute[object]) -> PoolFuture[list[Any]]:
        """Queue a call, or begin it.

        Raises:
            ConfigurationError: it cannot be sent, or the pool is closed.
        """
        from skyproxy.functions import Payload

        if hasattr(call.function, "__skyproxy_calls__"):
            raise ConfigurationError(
                f"{call.name} is a method of one actor, and `@` runs on every rank. Use `>>`; for an actor on each "
                "rank, Model.on_all(pool)(...).broadcast(Model.method, ...)."
            )
        if call.options.max_restarts and call.options.remote:
            raise ConfigurationError(
                f"{call.name}: tensors that stay on the workers are gone when a rank that died is started again. "
                "Leave out remote(), or with_restarts()."
            )
        payload = Payload.of(self._group.task(as_task(call.function)), call.args, call.kwargs)
        count = len(self._slots)
        if payload.session is not None and count > 1:
            raise ConfigurationError(
                f"the arguments of {call.name} hold remote tensors, which live on one process, and `@` runs on all "
                f"{count}. Pass values (x.cpu()), or run it there alone: f(x) >> pool."
            )
        future: PoolFuture[list[object]] = PoolFuture(call.name)
        with self._lock:
            if self._closed:
                raise closed_error()
            self._waiting.append((future, lambda: self._run(call, payload, future)))
            first = self.next()
        if first is not None:
            first()
        return future

    def next(self) -> Callable[[], None] | None:
        """Return a function that begins the next one, if it is its turn; with the lock held."""
        while self._waiting and not self._is_running and len(self._slots):
            future, begin = self._waiting.popleft()
            if not future.cancelled():
                self._is_running = True
                return begin
        return None

    def close(self) -> list[PoolFuture[list[object]]]:
        """Take no more, forget those that wait, and return them; with the lock held."""
        self._closed = True
        return self.forget()

    def forget(self) -> list[PoolFuture[list[object]]]:
        """Forget those that wait, and return them; with the lock held."""
        left = [future for future, _ in self._waiting]
        self._waiting.clear()
        return left

    def _run(self, call: PendingCompute[object], payload: Payload, future: PoolFuture[list[object]]) -> None:
        with self._lock:
            slots = list(self._slots)
            for slot in slots:
                slot.broadcasts += 1
        if call.options.max_restarts:
            Restarting(
                lambda beside: self._begin(call, payload, slots, beside),
                future,
                call.options.max_restarts,
                lambda checkpoints: self._on_end(slots, checkpoints),
            ).start()
            return
        try:
            gathered = self._begin(call, payload, slots, {})
        except BaseException as error:
            self._on_end(slots)
            future.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        gathered.add_done_callback(lambda _: self._on_end(slots))
        future.follow(gathered)

    def _begin(
        self, call: PendingCompute[object], payload: Payload, slots: Sequence[Slot], beside: Mapping[str, object]
    ) -> Future[list[object]]:
        """Begin a call on all ranks, with this beside it; the future of their results."""
        if self._closed:
            raise closed_error()
        calls: dict[int, Call] = {}
        outputs: dict[int, TaskOutput] = {}

        def finish_outputs() -> None:
            for output in outputs.values():
                output.finish()

        try:
            crew = self._group.crew([slot.rank for slot in slots])
            members = crew.members
            outputs.update({rank: TaskOutput(None if len(members) == 1 else rank) for rank in members})

            def begin(rank: int, file: PayloadFile | PassedPayload | None) -> Call:
                return members[rank].submit_payload(
                    payload,
                    on_output=outputs[rank].write,
                    name=call.name,
                    results="remote" if call.options.remote else "value",
                    isolate=bool(call.options.isolate),
                    debug=call.options.debug,
                    context={**crew.context(rank), **beside},
                    file=file,
                )

            begin_on_all(members, payload, begin, calls, crew.addresses)
        except BaseException:
            for begun in calls.values():
                begun.cancel()
            finish_outputs()
            raise
        gathered = crew.gather(calls, call.options.timeout_seconds, call.name)
        gathered.add_done_callback(lambda _: finish_outputs())
        return gathered

    def _on_end(self, slots: Sequence[Slot], checkpoints: str = "") -> None:
        if checkpoints:
            self._remove(checkpoints)
        with self._lock:
            for slot in slots:
                slot.broadcast_ended()
            self._is_running = False
            if self._waiting:
                self._wake()

    def _remove(self, checkpoints: str) -> None:
        """Remove the folder for checkpoints on every machine, without waiting for that."""
        remove_checkpoints(checkpoints)
        for node in self._group.members.values():
            with contextlib.suppress(SkyproxyError):  # a process that is gone; another one of the machine does it
                node.submit(remove_checkpoints, checkpoints, results="value")
