"""Spans of OpenTelemetry around pool calls, functions and waits, where a program has set OpenTelemetry up.

Never around an operation. Where the program did not import OpenTelemetry, or chose no provider, a span costs one look
into a dictionary. skyproxy itself imports nothing of it and sends nothing: where spans go is the program's choice.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_API = "opentelemetry.trace"
_NO_PARENT = nullcontext()


def begin(name: str, **attributes: str | int) -> Any:
    """Begin a span, a child of the caller's current one; return None where nobody wants it.

    Args:
        name: of the span, "skyproxy.function".
        attributes: of the span; each gets "skyproxy." in front of its name.
    """
    trace = sys.modules.get(_API)
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # no provider was chosen
        return None
    named = {f"skyproxy.{key}": value for key, value in attributes.items()}
    return provider.get_tracer("skyproxy").start_span(name, attributes=named)


def end(span: Any, error: str = "") -> None:
    """End a span that `begin` gave.

    Args:
        span: the span, or None.
        error: the name of what it ended with, never its text, which may hold data; empty where all went well.
    """
    if span is None:
        return
    if error:
        trace = sys.modules[_API]
        span.set_attribute("error.type", error)
        span.set_status(trace.Status(trace.StatusCode.ERROR))
    span.end()


def as_parent(span: object) -> AbstractContextManager[object]:
    """Let spans that begin in the block be children of this one; do nothing for None."""
    if span is None:
        return _NO_PARENT
    entered: AbstractContextManager[object] = sys.modules[_API].use_span(
        span, end_on_exit=False, record_exception=False, set_status_on_exception=False
    )
    return entered
