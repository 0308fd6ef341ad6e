"""What a worker answers, and what a client takes for an answer."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.protocol.answers import ANSWERS, EVENTS, checked, checked_event, checked_rows
from skyproxy.protocol.call_messages import CALL_EVENTS

ROOT = Path(__file__).parents[2]
OSC = "\x1b]52;c;ZXZpbA==\x07"
_ASKERS = {"call", "_call", "_ask", "ask_control"}
_OTHERS = {"pools", "providers"}
"""Packages that have functions of these names for something else."""


def questions(path: Path) -> set[str]:
    """The controls that a file of the client asks, by their names."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return {
        argument.value
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in _ASKERS
        for argument in [next((one for one in call.args if isinstance(one, ast.Constant)), None)]
        if argument is not None and isinstance(argument.value, str) and argument.value.isidentifier()
    }


GOOD: list[tuple[str, Any, Any]] = [
    ("item", 2.5, 2.5),
    ("item", True, True),
    ("equal", False, False),
    ("synchronize", None, None),
    ("synchronize", {"anything": [OSC]}, None),
    ("initial_seed", (1 << 64) - 1, (1 << 64) - 1),
    ("generator_seed", -(1 << 63), -(1 << 63)),
    ("random_state", b"state", b"state"),
    (
        "modes_in_force",
        {"default_dtype": "float32", "flags": [True, None]},
        {"default_dtype": "float32", "flags": [True, None]},
    ),
    ("blob_stats", None, None),
    ("compiler_trouble", OSC, "\\x1b]52;c;ZXZpbA==\\x07"),
    ("elapsed_milliseconds", 3, 3.0),
    ("hold_named", {"held_seconds": 5, "more": 1}, {"held_seconds": 5.0}),
    ("hold_named", {"moved": "ws://a\x1b"}, {"moved": "ws://a\\x1b"}),
    ("list_named", [["x\n", 1, 8, 0.5]], [["x\n", 1, 8, 0.5]]),
]
BAD: list[tuple[str, Any]] = [
    ("item", "2.5"),
    ("item", None),
    ("item", [1]),
    ("item", b"1"),
    ("item", 1 << 64),
    ("equal", 1),
    ("storage_bytes", -1),
    ("storage_bytes", True),
    ("storage_bytes", 1 << 63),
    ("elapsed_milliseconds", float("nan")),
    ("elapsed_milliseconds", float("inf")),
    ("elapsed_milliseconds", 10**400),
    ("initial_seed", 1 << 64),
    ("random_state", "text"),
    ("random_state", 10**9),
    ("modes_in_force", [[[[[[]]]]]]),
    ("memory_stats", {"allocated": 1}),
    ("memory_stats", None),
    ("memory_summary", 7),
    ("compile_report", {"graphs": 1, "eager": 0, "inductor": 0, "troubles": "abc"}),
    ("hold_named", 7),
    ("hold_named", {"held_seconds": "x"}),
    ("hold_named", {"refused": ["no"]}),
    ("put_named", 3),
    ("named_value", {"names": 7}),
    ("named_value", {"version": "1"}),
    ("list_named", [["x", 1, 8]]),
    ("list_named", {}),
    ("named_sessions", ["x"]),
    ("list_snapshots", [7]),
    ("load_snapshot", {}),
    ("save_snapshot", None),
    ("read_snapshot", {"total_bytes": 1, "part": "text"}),
]


@pytest.mark.parametrize(("control", "answer", "taken"), GOOD)
def test_an_answer_of_its_shape_is_taken_with_words_that_command_nothing(control: str, answer: Any, taken: Any) -> None:
    assert checked(control, answer) == taken


@pytest.mark.parametrize(("control", "answer"), BAD)
def test_an_answer_of_another_shape_is_an_error_in_words(control: str, answer: Any) -> None:
    with pytest.raises(ProtocolError, match=f"to {control}, which should have been"):
        checked(control, answer)


FLOAT = ["float32", [2, 3], [3, 1], 0]


@pytest.mark.parametrize(
    "row",
    [
        [FLOAT, -1],
        [FLOAT, 0],
        [None, 5],
        ["list", [[FLOAT, -1], [None, None]]],
        [["float32", [2], [], 0, "sparse_coo", 1, 0], -1],
        [["nested", "float32", [[2], [3]], [[1], [1]], [0, 2]], -1],
    ],
)
def test_what_slots_hold_is_taken(row: Any) -> None:
    assert checked_rows("aten::nonzero", [row], 1) == [row]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        7,
        [],
        [[FLOAT, -1]] * 2,
        [FLOAT],
        [[FLOAT, None]],
        [[FLOAT, -2]],
        [[["float32", [1 << 62, 4], [4, 1], 0], -1]],
        [[["float32", [-1], [1], 0], -1]],
        [[["float32", [1] * 1025, [1] * 1025, 0], -1]],
        [[["float32", [2], [1, 1], 0], -1]],
        [[["float32", "ab", [1], 0], -1]],
        [[["float32", [2]], -1]],
        [[[7, [2], [1], 0], -1]],
        [["list", 5]],
        [["list", [["list", [["list", []]]]]]],
        [[None, [[[[[[]]]]]]]],
        [[["nested", "float32", [[2], [3]], [[1]], [0, 2]], -1]],
        [[["nested", "float32", [[2], [3, 3]], [[1], [1]], [0, 2]], -1]],
        [[["nested"], -1]],
    ],
)
def test_what_no_slot_can_hold_is_refused(rows: Any) -> None:
    with pytest.raises(ProtocolError, match="to aten::nonzero, which should have been"):
        checked_rows("aten::nonzero", rows, 1)


def test_every_question_of_the_client_has_the_shape_of_its_answer() -> None:
    asked: set[str] = set()
    for path in (ROOT / "skyproxy").rglob("*.py"):
        if path.relative_to(ROOT / "skyproxy").parts[0] not in _OTHERS:
            asked |= questions(path)
    assert {"item", "hold_named", "list_snapshots", "load_snapshot", "named_sessions", "query_event"} <= asked
    assert asked <= ANSWERS.keys()


def test_every_shape_is_the_answer_of_a_control() -> None:
    from skyproxy_server import function_controls, graph_controls, name_controls
    from skyproxy_server.controls import CONTROLS
    from skyproxy_server.snapshots import controls as snapshot_controls

    for module in (function_controls, graph_controls, name_controls, snapshot_controls):
        module.install()
    assert ANSWERS.keys() <= CONTROLS.keys()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("output", {}),
        ("output", {"text": 5, "stream": "stdout"}),
        ("output", {"text": "t", "stream": "elsewhere"}),
        ("output", {"text": "t", "stream": "stdout", "lost": OSC}),
        ("result", {}),
        ("result", {"tensors": 3, "bases": []}),
        ("result", {"tensors": [5], "bases": []}),
        ("result", {"tensors": [], "bases": [], "changed": 5}),
        ("item", {"tensors": [], "bases": [-1]}),
        ("error", {"tensors": 5}),
        ("unknown", {"reason": 5}),
    ],
)
def test_an_event_of_a_call_that_no_worker_sends_is_refused(kind: str, value: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="which should have been"):
        checked_event(kind, value)


def test_no_worker_puts_an_error_of_this_program_into_an_event() -> None:
    assert checked_event("error", {"exception": "text", "type": "ValueError"}) == {"type": "ValueError"}
    assert set(EVENTS) == CALL_EVENTS
