"""The calls of one actor: in the order in which they were made, beside whatever else its process runs."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyproxy.errors import ActorDiedError, ConfigurationError, SessionLostError
from skyproxy.payloads.sent_actors import SENT_HANDLES, call_for_another, call_own_actor, no_items
from skyproxy.pools.call_options import CallOptions, Retry, is_stream
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.loop_thread import loop_thread
from skyproxy.pools.output_view import TaskOutput
from skyproxy.pools.pending import PendingCompute, warn_in_a_loop
from skyproxy.pools.pool_task import PoolTask
from skyproxy.pools.scheduler import Scheduler

if TYPE_CHECKING:
    from skyproxy.pools.actor_place import ActorPlace

_waiting = threading.Lock()
_BY_NAME: weakref.WeakValueDictionary[str, ActorCalls] = weakref.WeakValueDictionary()
"""The queues of this program's actors, by their names on workers."""
_RETRIES = 1_000_000
"""For `retry=True`: how often is for `max_restarts` to say."""


@dataclass(frozen=True)
class ActorOptions:
    """Options of an actor's life.

    Attributes:
        max_restarts: how often it is made again after its process died.
        retry: whether calls that ran or waited then are made again.
        timeout_seconds: how long each call may run; forever by default.
        remote: whether tensors in results stay on the worker.
        concurrency: calls that run at a time.
    """

    max_restarts: int = 0
    retry: bool = False
    timeout_seconds: float | None = None
    remote: bool = False
    concurrency: int = 1


class ActorMethod:
    """A method of an actor: calling it calls the actor. It goes where functions go: `pool.submit(actor.step, x)`.

    Attributes:
        owner: the handle, which lives as long as a call does.
        name: of the method.
    """

    def __init__(self, owner: object, calls: ActorCalls, name: str, function: Callable[..., object]) -> None:
        self.owner = owner
        self.name = name
        self.__name__ = name
        self.__qualname__ = f"{calls.place.name}.{name or '__init__'}"
        self.__doc__ = function.__doc__
        self.__signature__ = _signature(function)
        self.__skyproxy_calls__ = calls
        self.__skyproxy_function__ = function

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """The result of an ordinary method, a future of a coroutine's, an iterator over what a generator yields."""
        calls = self.__skyproxy_calls__
        call: PendingCompute[object] = PendingCompute(self, args, kwargs, CallOptions(), self.name)
        if is_stream(self):
            return calls.stream(call)
        if inspect.iscoroutinefunction(self.__skyproxy_function__):
            return calls.submit(call)
        warn_in_a_loop(f"{self.__qualname__}()")
        return calls.submit(call).wait()

    def check(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Check that the method takes these arguments.

        Raises:
            TypeError: the method does not take such arguments.
        """
        if self.__signature__ is None:
            return
        try:
            self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__qualname__}(): {error}") from None

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.owner, self.name)

    def __repr__(self) -> str:
        return f"<method {self.__qualname__} of an {self.__skyproxy_calls__.place}>"


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some builtins do not say
        return None


class RelayedMethod(ActorMethod):
    """The same, called by a function on a worker: its one argument is what that worker has written of them."""

    def check(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Nothing: nobody reads the arguments here."""


class ActorTask(PoolTask):
    """A call of an actor on its way.

    Attributes:
        life: of the actor, that the call is for; see `ActorPlace.life`.
    """

    life = 0


class ActorCalls(Scheduler):
    """The queue of one actor.

    Attributes:
        place: where it lives.
    """

    def __init__(self, place: ActorPlace, options: ActorOptions) -> None:
        retry = Retry(_RETRIES) if options.retry else None
        super().__init__(place, concurrency=options.concurrency, retry=retry)  # type: ignore[arg-type]  # a group of one
        self.place = place
        self._options = options
        # Looked up now: finalizers run anywhere, even where its lock is held.
        self._loop = loop_thread()
        self._waits_for: list[ActorCalls] = []
        """The actors whose answers calls of this one wait for."""
        _BY_NAME[place.identity] = self

    # --- calls from workers -------------------------------------------------------------------------------------------

    def keep(self, handle: object) -> None:
        """A handle is being sent to somebody: the actor lives until the pool ends.

        Raises:
            ConfigurationError: it has ended.
        """
        with self._lock:
            if self._closed:
                raise ConfigurationError(f"{self.place.name} belongs to an actor that has ended, with its pool.")
            SENT_HANDLES.add(self.place.identity, handle)

    def submit_for(self, handle: object, name: str, content: bytes, asker: str) -> PoolFuture[bytes]:
        """Call a method for a function on a worker.

        Args:
            handle: of this actor.
            name: of the method.
            content: its arguments, as that worker wrote them.
            asker: the actor that asks; empty for a task.

        Returns:
            The future of what `call_for_another` returns.

        Raises:
            AttributeError: there is no such method.
            ConfigurationError: it gives items one by one, or would wait forever.
            LimitExceededError: too many calls wait already.
        """
        method = getattr(handle, name)
        if not isinstance(method, ActorMethod) and name != "__call__":
            raise AttributeError(f"{self.place.name} has no method {name:.100}.")
        relayed = RelayedMethod(handle, self, name, getattr(method, "__skyproxy_function__", method))
        if is_stream(relayed):
            raise no_items(relayed.__qualname__)
        call: PendingCompute[bytes] = PendingCompute(relayed, (content,), {}, CallOptions(), name)
        asking = _BY_NAME.get(asker)
        with _waiting:
            if asking is not None and self._waits_on(asking, set()):
                raise ConfigurationError(
                    f"{relayed.__qualname__} would wait forever: the {self.place} waits for the {asking.place}, which "
                    "asks. Let it run more calls at a time, @actor(concurrency=2), or return what it needs."
                )
            if asking is not None:
                asking._waits_for.append(self)
        try:
            future = self.submit(call)
        except BaseException:
            self._end_wait(asking)
            raise
        future.add_done_callback(lambda done: self._end_wait(asking))
        return future

    def _waits_on(self, asking: ActorCalls, seen: set[ActorCalls]) -> bool:
        """Return whether calls of this actor go on only when the other's do."""
        if self._options.concurrency > 1 or self in seen:
            return False
        seen.add(self)
        return self is asking or any(other._waits_on(asking, seen) for other in self._waits_for)

    def _end_wait(self, asking: ActorCalls | None) -> None:
        if asking is not None:
            with _waiting:
                asking._waits_for.remove(self)

    # --- its queue ----------------------------------------------------------------------------------------------------

    def _task(self, call: PendingCompute[object]) -> PoolTask:
        from skyproxy.functions import Payload

        method: ActorMethod = call.function  # type: ignore[assignment]
        method.check(call.args, call.kwargs)
        options, ours = call.options, self._options
        if options.rank not in (None, self.place.rank):
            raise ConfigurationError(
                f"{method.__qualname__} cannot run on rank {options.rank}: {self.place} lives elsewhere."
            )
        is_relayed = isinstance(method, RelayedMethod)
        function = self.place.task(call_for_another if is_relayed else call_own_actor)
        function.__qualname__ = method.__qualname__
        arguments = call.args if is_relayed else (call.args, call.kwargs)
        payload = Payload.of(function, (self.place.identity, method.name, *arguments))
        if payload.session is not None and not self.place.holds(payload.session):
            raise ConfigurationError(
                f"the arguments of {method.__qualname__} hold remote tensors that do not live with the {self.place}. "
                f"Move them first: x.to(pool.nodes[{self.place.rank}].device(...)), or pass x.cpu()."
            )
        if options.isolate:
            raise ConfigurationError(
                f"{call.name} is a method of an actor, whose state is in its worker's own process, so isolate=True "
                "cannot be had for it. Call an isolated function beside the actor, or leave isolate out."
            )
        merged = CallOptions(options.timeout_seconds or ours.timeout_seconds, None, options.remote or ours.remote)
        made: PendingCompute[object] = PendingCompute(method, (), {}, merged, method.__qualname__)
        task = ActorTask(made, payload, None, options.retry or self._retry)
        task.keeps = method.owner
        # A call that is made after a death knows of it; those before it waited for a state that is gone.
        task.life = self.place.life + (self.place.life > 0 and not self.place.is_alive)
        return task

    def _claim(self, task: PoolTask) -> bool:
        # Making an actor may take long, and is for the queue's own thread.
        return self.place.is_alive and super()._claim(task)

    def _start(self, task: PoolTask) -> None:
        if task.future.cancelled():
            self._release_rank(task)
            return
        try:
            self.place.revive()
            if self._life_of(task) < self.place.life and not self._retries(task) and self.place.life > 1:
                raise self.place.outlived_error(task.name)
        except Exception as error:
            task.tries += 1
            self._on_failure(task, error)
            return
        super()._start(task)

    def _life_of(self, task: PoolTask) -> int:
        return task.life if isinstance(task, ActorTask) else 0

    def _retries(self, task: PoolTask) -> bool:
        return issubclass(SessionLostError, task.retry.on) and task.retry.times > 0

    def _on_failure(self, task: PoolTask, error: BaseException) -> None:
        if isinstance(error, SessionLostError) and not isinstance(error, ActorDiedError):
            if not (self._retries(task) and task.tries <= task.retry.times and self.place.can_restart):
                error = self._explain_loss(task.name, task.rank, True, error)
        if isinstance(error, ActorDiedError):
            task.tries = max(task.tries, task.retry.times + 1)  # trying again would not help
        super()._on_failure(task, error)

    def _explain_loss(self, name: str, rank: int | None, again: bool, error: SessionLostError) -> SessionLostError:
        if isinstance(error, ActorDiedError):
            return error
        died = self.place.death_error(name, error)
        died.__cause__ = error
        return died

    def _cancel(self, task: PoolTask) -> None:
        super()._cancel(task)
        if task.running is None:
            task.keeps = None

    def _output(self, rank: int) -> TaskOutput:
        return self.place.output()

    def _check_wait(self, task: PoolTask) -> None:
        try:
            super()._check_wait(task)
        except ConfigurationError:
            raise ConfigurationError(
                f"{task.name} would wait forever: the {self.place} is busy with a stream that this program reads, and "
                "that goes on only when this wait is over. Take its items first: list(...); or let it run more calls "
                "at a time, @actor(concurrency=2)."
            ) from None

    def close(self) -> None:
        """Cancels what waits and what runs, also what makes the actor. Idempotent."""
        super().close()
        self.place.close()
        SENT_HANDLES.drop(self.place.identity)

    def retire(self) -> None:
        """Nobody can call the actor any more: let go of it, later and elsewhere. Safe in a finalizer."""
        self._loop.post(self._retire)

    def _retire(self) -> None:
        self.close()
        # Telling the worker may wait for a connection.
        threading.Thread(target=self.place.drop, name="skyproxy-actor-end", daemon=True).start()
