"""Requests that a client can make about its graphs: captured streams, and programs that were compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyproxy_server.compiled import CompiledSignature, compiler_problem
from skyproxy_server.controls import CONTROLS
from skyproxy_server.session_state import SessionState


def graph_begin(session: SessionState) -> None:
    """The client begins to capture."""
    session.graphs.begin()


def graph_define(
    session: SessionState,
    number: int,
    stream: list[object],
    exports: list[object],
    places: list[Any],
    modes: dict[str, object],
) -> None:
    """Keep a graph that the client has captured."""
    session.graphs.define(number, stream, exports, places, modes)


def graph_abort(session: SessionState, slots: list[int]) -> None:
    """The client gave a capture up."""
    session.graphs.abort(slots)


def graph_forget(session: SessionState, number: int) -> None:
    """The client's graph is gone."""
    session.graphs.forget(number)


def graph_report(session: SessionState) -> dict[str, int]:
    """Report the session's graphs."""
    return session.graphs.report()


def compiler_trouble(session: SessionState, device: list[Any]) -> str:
    """Return why graphs cannot be compiled for a device here; empty if they can."""
    return compiler_problem(device[0])


def forget_compiled(session: SessionState, number: int) -> None:
    """The client needs a compiled graph no more."""
    session.ops.forget_program(number)


def compile_report(session: SessionState) -> dict[str, object]:
    """Report how the session's compiled graphs run."""
    programs = [s.program for s in session.ops.signatures.values() if isinstance(s, CompiledSignature) and s.program]
    return {
        "graphs": len(programs),
        "eager": sum(program.ran == "eager" for program in programs),
        "inductor": sum(program.ran == "inductor" for program in programs),
        "troubles": sorted({program.trouble for program in programs if program.trouble}),
    }


def install() -> None:
    """Make these controls known."""
    functions: list[Callable[..., object]] = [
        graph_begin,
        graph_define,
        graph_abort,
        graph_forget,
        graph_report,
        compiler_trouble,
        forget_compiled,
        compile_report,
    ]
    CONTROLS.update({function.__name__: function for function in functions})
