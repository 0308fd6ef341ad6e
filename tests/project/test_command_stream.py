"""The flat stream of commands has one grammar, and one place that knows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWNER = "skyproxy/protocol/commands.py"
SOURCES = sorted(path for package in ("skyproxy", "skyproxy_server") for path in (ROOT / package).rglob("*.py"))
assert len(SOURCES) > 100


def walkers_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The places that step through a stream of commands by themselves: line, and what they do there."""
    for node in ast.walk(tree):
        looked_up = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_widths(node.value)
        if looked_up or (isinstance(node, ast.Call) and _is_look_up(node.func)):
            yield node.lineno, "asks how many operands a command takes"
        elif isinstance(node, ast.While) and _steps_through_stream(node):
            yield node.lineno, "steps through a stream"


def _is_widths(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "OPERANDS" or (name == "widths" and isinstance(node, ast.Attribute))


def _is_look_up(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("get", "__getitem__") and _is_widths(node.value)


def _steps_through_stream(loop: ast.While) -> bool:
    """Whether the loop changes a name by which it takes items out of a stream."""
    changed = {
        target.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) == "stream"
        and isinstance(node.slice, ast.Name)
        and node.slice.id in changed
        for node in ast.walk(loop)
    )


def test_the_grammar_of_commands_is_walked_in_one_place() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": what
        for path in SOURCES
        if path != ROOT / OWNER
        for line, what in walkers_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found, f"these know where a command ends, and should use `commands.walk`: {found}"


def test_the_owner_walks_it_twice() -> None:
    """Once by widths, once by the handlers, which a property test holds against each other."""
    tree = ast.parse((ROOT / OWNER).read_text(encoding="utf-8"))
    walking = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.While) and _steps_through_stream(node) for node in ast.walk(function))
    ]
    assert walking == ["walk", "execute"]


@pytest.mark.parametrize(
    "text",
    [
        "while position < end:\n    position += 1 + width_of(stream[position])",
        "while p < len(self.stream):\n    number = self.stream[p]\n    p = p + 1 + known[number]",
        "width = commands.OPERANDS.get(number)",
        "width = commands.OPERANDS[number]",
        "at += recorder.widths[number]",
    ],
)
def test_a_walker_of_ones_own_is_found(text: str) -> None:
    assert list(walkers_in(ast.parse(text)))


# --- the recorder's lists --------------------------------------------------------------------------------------------

LISTS = {"stream", "lines", "free", "dirty"}
KNOW_THE_LISTS = {
    "skyproxy/session/recorder.py",
    # One op in a few microseconds: it cannot afford the calls.
    "skyproxy/tensor/dispatch/hot_path.py",
    "skyproxy/tensor/dispatch/factories.py",
    # What stands in for a recorder during a capture shows the hot path the lists of the one or of the other.
    "skyproxy/tensor/dispatch/capture.py",
}


def lists_used_in(source: str) -> list[int]:
    """The lines in which something has to do with a recorder's lists, generated text included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        owner = node.value if isinstance(node, ast.Attribute) and node.attr in LISTS else None
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if name.endswith("recorder") or any(f"recorder.{attribute}" in text for attribute in LISTS):
            found.append(node.lineno)
    return found


def test_a_recorders_lists_are_known_in_few_places() -> None:
    found = {
        path: lines
        for path in SOURCES
        if str(path.relative_to(ROOT)) not in KNOW_THE_LISTS and (lines := lists_used_in(path.read_text("utf-8")))
    }
    assert not found, f"these should call emit, emit_line, take_slot or drop_slot of the recorder: {found}"


@pytest.mark.parametrize("path", sorted(KNOW_THE_LISTS))
def test_whoever_may_know_the_lists_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(
    "text",
    [
        "device.recorder.stream.extend(wire)",
        "free = self._recorder.free",
        "recorder.dirty.append(slot)",
        'body = ["recorder.lines.extend(line)"]',
    ],
)
def test_whoever_knows_the_lists_is_found(text: str) -> None:
    assert lists_used_in(text) == [1]


# --- whose recorder it is --------------------------------------------------------------------------------------------


def recorders_set_from_outside(source: str) -> list[int]:
    """The lines that put a recorder, or a maker of handles, into an object that is not `self`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _has_target(node) else []
        for target in (item for each in targets for item in (each.elts if isinstance(each, ast.Tuple) else [each])):
            if isinstance(target, ast.Attribute) and target.attr in ("recorder", "handle_type"):
                if not (isinstance(target.value, ast.Name) and target.value.id == "self"):
                    found.append(target.lineno)
    return found


def _has_target(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign | ast.AugAssign)


def test_nobody_puts_a_recorder_of_its_own_into_a_session_or_a_device() -> None:
    found = {path: lines for path in SOURCES if (lines := recorders_set_from_outside(path.read_text("utf-8")))}
    assert not found, f"these should call divert and end_diversion: {found}"


@pytest.mark.parametrize(
    "text",
    ["self.session.recorder = mine", "a, device.recorder = 1, mine", "device.handle_type = make", "x.recorder: R = y"],
)
def test_whoever_does_so_is_found(text: str) -> None:
    assert recorders_set_from_outside(text) == [1]
