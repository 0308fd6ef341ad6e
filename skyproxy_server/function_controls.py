"""The links between calls and tensor operations: their arguments come from there, and their results go there."""

from __future__ import annotations

from collections.abc import Callable

from skyproxy.errors import ConfigurationError
from skyproxy_server.controls import CONTROLS
from skyproxy_server.failures import PoisonedError
from skyproxy_server.functions.registry import Calls
from skyproxy_server.session_state import SessionState


def _calls(session: SessionState) -> Calls:
    if session.calls is None:
        raise ConfigurationError("this session runs no functions: --no-functions, or its token's scopes")
    return session.calls


def bind_call(session: SessionState, call: str, slots: list[int]) -> None:
    """These values are the tensor arguments of a call: as they are now, after every operation before.

    The function draws from the process's default generators, which from now on hold this session's state.
    """
    calls = _calls(session)
    session.random.take_over()
    try:
        arguments = [session.values.get(slot, writes=True) for slot in slots]
    except PoisonedError as error:
        session.values.mark_reported(error.failed)
        calls.refuse(session.identity, call, {**error.failed.record, "failed": True})
        return
    calls.bind(session.identity, call, arguments, session.streams)


def adopt_results(session: SessionState, call: str, number: int, slots: list[int]) -> None:
    """The tensors of an event of a call become values of this session; slot 0 drops one."""
    kept = _calls(session).take(call, number)
    if kept is None or len(kept) != len(slots):
        text = "this result of a function is gone: another session took it, or it was kept for too long."
        failed = session.reports.silent_failure(RuntimeError(text))
        session.values.slots.update((slot, failed) for slot in slots if slot)
        return
    session.values.slots.update((slot, tensor) for slot, tensor in zip(slots, kept, strict=True) if slot)


def forget_call(session: SessionState, call: str) -> None:
    """The client has all it wants of a call."""
    _calls(session).forget(call)


def install() -> None:
    """Makes these controls known."""
    functions: list[Callable[..., object]] = [bind_call, adopt_results, forget_call]
    CONTROLS.update({function.__name__: function for function in functions})
