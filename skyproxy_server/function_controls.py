"""The links between calls and tensor operations: their arguments come from there, and their results go there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy_server.controls import CONTROLS
from skyproxy_server.failures import Failed, PoisonedError
from skyproxy_server.functions.lent_tensors import LentTensors
from skyproxy_server.functions.registry import Calls
from skyproxy_server.lost_context import raise_if_lost
from skyproxy_server.session_state import SessionState


def _calls(session: SessionState) -> Calls:
    if session.calls is None:
        raise ConfigurationError("this session runs no functions: --no-functions, or its token's scopes")
    return session.calls


class _Loan:
    """The loan of a session to a function in a process of its own."""

    def __init__(self, session: SessionState, arguments: list[torch.Tensor]) -> None:
        self.tensors = LentTensors(arguments, session.values.slots.values())
        self._random = session.random
        self._before = session.random.states()

    def random_states(self) -> list[list[object]]:
        """The session's random numbers, as the function draws them."""
        return [[*key, state.numpy().tobytes()] for key, state in self._before.items()]

    def take_random_states(self, states: object) -> None:
        """The function has drawn up to these.

        Raises:
            ProtocolError: they are none.
        """
        self._random.move_on(self._before, _states(states, self._before))


def _states(rows: Any, known: dict[tuple[str, int], torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    found: dict[tuple[str, int], torch.Tensor] = {}
    for kind, index, data in rows:
        before = known.get((kind, index))
        if before is not None:
            if type(data) is not bytes or len(data) != before.nbytes:
                raise ProtocolError(f"the state of a random generator that is {type(data).__name__}, or too long")
            found[kind, index] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return found


def bind_call(session: SessionState, call: str, slots: list[int], isolate: bool = False) -> None:
    """These values are the tensor arguments of a call: as they are now, after every operation before.

    The function draws from the process's default generators, which from now on hold this session's state.
    """
    calls = _calls(session)
    session.random.take_over()
    try:
        arguments = [session.values.get(slot, writes=True) for slot in slots]
        loan = _Loan(session, arguments) if isolate else None
    except PoisonedError as error:
        session.values.mark_reported(error.failed)
        calls.refuse(session.identity, call, {**error.failed.record, "failed": True})
        return
    except (TypeError, OSError, RuntimeError) as error:  # whoever called waits for the call, not for this command
        raise_if_lost(error, Failed(error, "bind_call", session.reports.sequence, 0))
        words: dict[str, object] = {"type": type(error).__name__, "message": str(error), "traceback": ""}
        calls.refuse(session.identity, call, words)
        return
    session.values.gates.note_loan(arguments)
    calls.bind(session.identity, call, arguments, session.streams, loan)


def adopt_results(session: SessionState, call: str, number: int, slots: list[int]) -> None:
    """The tensors of an event of a call become values of this session; slot 0 drops one."""
    kept = _calls(session).take(call, number)
    if kept is None or len(kept) != len(slots):
        text = "this result of a function is gone: another session took it, or it was kept for too long."
        failed = session.reports.silent_failure(RuntimeError(text))
        session.values.slots.update((slot, failed) for slot in slots if slot)
        return
    for slot, tensor in zip(slots, kept, strict=True):
        if slot:
            session.values.gates.note_memory(tensor)
            session.values.slots[slot] = tensor


def forget_call(session: SessionState, call: str) -> None:
    """The client has all it wants of a call."""
    _calls(session).forget(call)


def install() -> None:
    """Makes these controls known."""
    functions: list[Callable[..., object]] = [bind_call, adopt_results, forget_call]
    CONTROLS.update({function.__name__: function for function in functions})
