"""The comparison of what two checkouts send: what it leaves out, and that it sees every other difference."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from skyproxy.protocol import commands

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
compare_wire: Any = importlib.import_module("compare_wire")

ADD = commands.FIRST_SIGNATURE
DEFINE = [commands.DEFINE, ADD, ["aten::add.Tensor", ["t", "t"], {"alpha": ["c", "int", 2]}, ["n"]]]
UPLOAD = [commands.UPLOAD, 1, ["float32", [2], [1], 0], ["cpu", None]]
OPS = [[ADD, 1, 2, 3], [ADD, 2, 3, 4]]


def test_batches_are_taken_apart_and_what_depends_on_time_is_left_out() -> None:
    one = [[[*DEFINE, *UPLOAD, *OPS[0], *OPS[1]], ["a hash"]]]
    several = [[[*DEFINE, *UPLOAD, *OPS[0]], ["a hash"]], [[commands.RELEASE, [5], *OPS[1]], []]]
    expected = [DEFINE, [*UPLOAD, "a hash"], *OPS]
    assert compare_wire.commands_of(one) == compare_wire.commands_of(several) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([OPS[0]], [OPS[1]]),
        (OPS, OPS[:1]),
        ([[ADD, 1]], [[ADD, 1.0]]),
        ([[ADD, 1]], [[ADD, True]]),
        ([[ADD, 0.0]], [[ADD, -0.0]]),
        ([[*UPLOAD, "a hash"]], [[*UPLOAD, "another"]]),
    ],
)
def test_every_other_difference_is_seen(before: Any, after: Any) -> None:
    assert compare_wire.first_difference(before, after)
    assert compare_wire.first_difference(before, before) == ""


def test_two_checkouts_are_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_wire.py", "."])
    with pytest.raises(SystemExit):
        compare_wire.main()
    assert "two checkouts" in capsys.readouterr().err
