"""Whatever the other side may say on an open connection has a handler on this one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    BULK,
    CLIENT,
    FUNCTIONS,
    JOBS,
    OPERATIONS,
    WORKER,
    Goodbye,
    Hello,
    Message,
    Received,
    Welcome,
)

ROOT = Path(__file__).resolve().parents[2]

READERS = {
    (CLIENT, OPERATIONS): [("skyproxy/session/session.py", "_handlers")],
    (CLIENT, BULK): [("skyproxy/session/session.py", "_bulk_handlers")],
    (CLIENT, FUNCTIONS): [("skyproxy/functions/channel.py", "_handlers")],
    (CLIENT, JOBS): [("skyproxy/jobs/link.py", "order")],
    (WORKER, OPERATIONS): [("skyproxy_server/named_batches.py", "resolve")],
    (WORKER, BULK): [("skyproxy_server/transfers.py", "receive")],
    (WORKER, FUNCTIONS): [("skyproxy_server/functions/connection.py", "run")],
    (WORKER, JOBS): [("skyproxy_server/jobs/connection.py", "run")],
}
"""By the side that reads and the kind of connection: the functions that choose what a message is handled by."""

ELSEWHERE = {
    Hello: "the listener reads it before the connection is open",
    Welcome: "connecting reads it before the connection is open",
    Goodbye: "the transport ends with it",
    Received: "the connection drops the answers that it confirms",
}
IGNORED: dict[tuple[str, str], set[str]] = {}
"""Messages that need no answer and tell nothing more than that they came."""


def read_by(side: str, kind: str) -> set[type[Message]]:
    """The messages that the other side may send on an open connection of a kind."""
    other = WORKER if side == CLIENT else CLIENT
    return {cls for cls in MESSAGES.values() if other in cls.senders and kind in cls.roles and cls not in ELSEWHERE}


def handled(source: str, function: str) -> set[str]:
    """The names that a function uses."""
    tree = ast.parse(source)
    (body,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    chosen = [node for node in ast.walk(body) if isinstance(node, ast.Dict | ast.Call)]
    keys = [key for node in chosen if isinstance(node, ast.Dict) for key in node.keys]
    tested = [argument for node in chosen if isinstance(node, ast.Call) and _is_test(node) for argument in node.args]
    return {node.id for node in (*keys, *tested) if isinstance(node, ast.Name)}


def _is_test(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "isinstance"


@pytest.mark.parametrize(("side", "kind"), READERS)
def test_each_message_has_a_handler(side: str, kind: str) -> None:
    names: set[str] = set()
    for path, function in READERS[side, kind]:
        names |= handled((ROOT / path).read_text(encoding="utf-8"), function)
    expected = {cls.__name__ for cls in read_by(side, kind)}
    assert expected
    assert expected - names == IGNORED.get((side, kind), set())


def test_each_connection_that_messages_name_is_read_on_both_sides() -> None:
    kinds = {kind for cls in MESSAGES.values() for kind in cls.roles}
    assert set(READERS) == {(side, kind) for side in (CLIENT, WORKER) for kind in kinds}


def test_a_handler_that_is_forgotten_is_found() -> None:
    source = "def run():\n    x = {Ack: f, Reply: g}\n    if isinstance(m, Batch):\n        h(Repeat)\n"
    assert handled(source, "run") >= {"Ack", "Reply", "Batch"}
    assert "Repeat" not in handled(source, "run")
