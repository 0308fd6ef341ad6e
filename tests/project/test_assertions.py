"""`python -O` leaves assertions out, and programs run all the same: no assertion does anything."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skyproxy", "skyproxy_server", "operator")
_CHANGING = frozenset(
    {"acquire", "add", "append", "appendleft", "clear", "close", "discard", "extend", "flush", "get_nowait", "insert"}
    | {"kill", "pop", "popitem", "popleft", "put", "read", "readline", "recv", "release", "remove", "send", "set"}
    | {"setdefault", "start", "stop", "take", "terminate", "unlink", "update", "wait", "write"}
)
PROGRAM = """
import torch, skyproxy
assert False, "assertions are left out"
x = torch.arange(4.0, device="sky:0", requires_grad=True)
x.square().sum().backward()
large = torch.ones(1 << 20, device="sky:0")
print(x.grad.tolist(), large.cpu().sum().item(), skyproxy.list_nodes()[0].run(len, [1, 2]))
"""


def assertions_that_act(source: str) -> list[int]:
    """The lines of assertions that name something, or call a method that may change something."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                called = part.func if isinstance(part, ast.Call) else None
                acts = isinstance(called, ast.Attribute) and called.attr in _CHANGING
                if acts or isinstance(part, ast.NamedExpr):
                    found.append(node.lineno)
    return found


def test_an_assertion_that_acts_is_found() -> None:
    assert assertions_that_act("assert names.pop() == 'x'\nassert (n := 1)\nassert names == ['pop']") == [1, 2]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_assertion_does_anything(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): assertions_that_act(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_program_runs_without_assertions_and_docstrings(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-OO", "-c", PROGRAM],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[0.0, 2.0, 4.0, 6.0] 1048576.0 2"
