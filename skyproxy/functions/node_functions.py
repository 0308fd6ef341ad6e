"""The part of a `Node` that runs functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, overload

from skyproxy.errors import ConfigurationError, add_note, text_of
from skyproxy.functions.call import Call
from skyproxy.functions.payload import Payload
from skyproxy.functions.runner import Results, Runner
from skyproxy.interrupts import raised_by_handler

P = ParamSpec("P")
T = TypeVar("T")


class NodeFunctions:
    """Runs functions on a worker."""

    _runner: Runner

    def submit(
        self,
        fn: Callable[..., object],
        /,
        *args: object,
        on_output: Callable[[str, str], object] | None = None,
        timeout: float | None = None,
        name: str | None = None,
        results: Results = "remote",
        context: Mapping[str, object] | None = None,
        trust_worker: bool | None = None,
        isolate: bool | None = None,
        debug: bool | None = None,
        **kwargs: object,
    ) -> Call:
        """Begins to run a function on the worker; does not wait for it.

        Remote tensors among the arguments, also inside modules and containers, arrive there as real tensors without a
        copy, in their state after everything recorded before. Everything else is pickled; your own modules are imported
        there.

        Args:
            fn: any callable: a function, nested or not, a lambda, an async function, a generator function.
            args, kwargs: its arguments, as for `run`. Those that have the names of options below go to the function by
                `functools.partial` only.
            on_output: called with "stdout" or "stderr" and the text, as it is printed; by default the text goes to
                `sys.stdout` and `sys.stderr` here. It must not wait for calls.
            timeout: seconds after which the call ends with a TimeoutError, wherever its function is by then.
            name: how to name the call to people; the function's name by default.
            results: "remote": tensors in the result stay on the worker and come back as remote tensors; "value": they
                come back as CPU tensors.
            context: small values for `skyproxy.runtime.current_call().values` on the worker.
            trust_worker: whether the result may be any object, of a pickle that may run any code here; by default as
                the node was connected. Otherwise it must be plain data, see `Call.trust_worker`.
            isolate: whether the function gets a process of its own on the worker, which ends with it: a crash, an exit
                or a leak harms nothing of the session. Its remote tensors are there by shared memory. By default as
                SKYPROXY_ISOLATE says, which `skyproxy run` sets.

            debug: whether `breakpoint()` and exceptions in the function wait for whoever looks, by `skyproxy debug`,
                for SKYPROXY_BREAKPOINT_SECONDS. By default as SKYPROXY_DEBUG says.

        Raises:
            FunctionCrashedError: from `result()`, if that process ended before the function had.
            ConfigurationError: the worker runs no functions, or these arguments cannot be sent.
            VersionMismatchError: the function's code cannot run on the worker's Python.
            SessionLostError: the worker is gone.

        Example:
            ```python
            call = node.submit(torch.sum, torch.ones(3, device=node.devices[0]))
            print(call.result().item())
            ```
        """
        options: dict[str, Any] = {
            "on_output": on_output,
            "timeout": timeout,
            "name": name,
            "results": results,
            "context": context,
            "trust_worker": trust_worker,
            "isolate": isolate,
            "debug": debug,
        }
        defaults = {"results": "remote"}
        _check_options(fn, args, frozenset(key for key, value in options.items() if value != defaults.get(key)))
        options["debug"] = self._runner.debugs(fn, debug)
        options["isolate"] = self._runner.isolates(fn, isolate)
        return self.submit_payload(Payload.of(fn, args, kwargs), **options)

    def submit_payload(self, payload: Payload, **options: Any) -> Call:
        """`submit` for a function that was pickled before, perhaps for many nodes.

        Args:
            payload: from `skyproxy.functions.Payload.of`.
            options: those of `submit`.
        """
        return self._runner.submit(payload, **options)

    @overload
    def run(self, fn: Callable[P, Coroutine[object, object, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def run(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """Runs a function on the worker and waits for what it returns; tensors in that stay there. See `submit`.

        Ctrl-C cancels the call, returns at once and leaves the node usable.

        Raises:
            Exception: whatever the function raised; its `__cause__` holds the worker's traceback.

        Example:
            ```python
            print(node.run(torch.sum, torch.ones(3, device=node.devices[0])).item())
            ```
        """
        try:
            return self._runner.run(fn, args, kwargs)
        except TypeError as error:
            _explain_options(error, kwargs)
            raise

    @overload
    async def execute(
        self, fn: Callable[P, Coroutine[object, object, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def execute(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def execute(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """`run` without blocking the event loop; cancelling the task cancels the call.

        Example:
            ```python
            async def main() -> None:
                print(await node.execute(pow, 2, 10))


            asyncio.run(main())
            ```
        """
        try:
            return await self._runner.execute(fn, args, kwargs)
        except TypeError as error:
            _explain_options(error, kwargs)
            raise

    def reattach(self, call_id: str, *, on_output: Callable[[str, str], object] | None = None) -> Call:
        """The call of this name that another session of the worker began, this process's or an earlier one's.

        A worker keeps a call, its result and the result's tensors for `call_grace_seconds` after its client is gone.
        Its output since then, as far as it was kept, comes first.

        Args:
            call_id: `Call.id`.
            on_output: as in `submit`.

        Returns:
            The call. Its result raises LookupError if the worker does not know it any more.

        Example:
            ```python
            call = node.submit(pow, 2, 10)
            print(call.id)  # to be kept, for a program that comes later
            print(node.reattach(call.id).result())
            ```
        """
        return self._runner.reattach(call_id, on_output)


def _check_options(fn: Callable[..., object], args: Sequence[object], given: frozenset[str]) -> None:
    """Refuse options of `submit` that a function waits for, too: whoever gave them may have meant its parameters.

    Raises:
        ConfigurationError: there is one.
    """
    if not given:
        return
    if isinstance(fn, FunctionType):  # quick, as pools make many calls
        code = fn.__code__
        parameters = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    else:
        try:
            parameters = list(inspect.signature(fn).parameters)
        except (ValueError, TypeError) as error:  # a function in C need not have a signature
            if raised_by_handler(error):
                raise
            return
    if both := given.intersection(parameters[len(args) :]):
        option, called = sorted(both)[0], getattr(fn, "__name__", "the function")
        raise ConfigurationError(
            f"{option}= is an option of submit and a parameter of {called}. To give it to {called}: "
            f"node.submit(functools.partial({called}, {option}=...)). To give it to submit: wrap {called} in a lambda."
        )


_OPTIONS = frozenset(
    name
    for name, parameter in inspect.signature(NodeFunctions.submit).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def _explain_options(error: TypeError, kwargs: Mapping[str, object]) -> None:
    """Add to a function's refusal of a keyword that it is an option of `submit`, if it is one."""
    for name in _OPTIONS.intersection(kwargs):
        if f"unexpected keyword argument '{name}'" in text_of(error):
            add_note(
                error,
                f"All keywords of `run` and `execute` go to the function. To give {name}= to the call: "
                f"node.submit(fn, ..., {name}=...).result()",
            )
