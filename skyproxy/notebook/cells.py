"""A notebook's cell as a function: which variables it reads, what it leaves behind, and how a worker runs it.

A worker imports this module too; it needs neither torch nor IPython.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

RESULT = "_sky_result"
"""The name under which the value of a cell's last expression is kept."""


class Cell(NamedTuple):
    """A cell, as far as it is known before it runs.

    Attributes:
        source: its text.
        reads: names that it may read before it sets them, in order.
        sets: names that it sets, in order.
    """

    source: str
    reads: tuple[str, ...]
    sets: tuple[str, ...]


def read_cell(source: str, filename: str) -> Cell:
    """Looks at a cell's names.

    Args:
        source: its text.
        filename: for error messages.

    Raises:
        SyntaxError: it is no Python.
    """
    reads: dict[str, None] = {}
    sets: dict[str, None] = {}
    certain: set[str] = set()
    for statement in ast.parse(source, filename).body:
        for node in ast.walk(statement):
            # `x += 1` reads x although the syntax tree has it as a place to store to.
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                reads.setdefault(node.target.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in certain:
                reads.setdefault(node.id)
        for name in _set_by(statement):
            sets.setdefault(name)
            if not isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.With | ast.Match):
                certain.add(name)
    return Cell(source, tuple(reads), tuple(sets))


def _set_by(node: ast.AST) -> Iterator[str]:
    """The names that a statement sets in the cell's own scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _set_by(child)


def inputs_of(cell: Cell, namespace: Mapping[str, object], hidden: Mapping[str, object]) -> dict[str, object]:
    """Those of a notebook's variables that a cell may read.

    Args:
        cell: the cell.
        namespace: the notebook's variables.
        hidden: what IPython put there itself, and nobody has replaced since.
    """
    return {
        name: namespace[name]
        for name in cell.reads
        if name in namespace and not (name in hidden and hidden[name] is namespace[name])
    }


def run_cell(cell: Cell, filename: str, /, **variables: object) -> dict[str, object]:
    """Run a cell; on the worker.

    Args:
        cell: the cell.
        filename: stands in tracebacks.
        variables: what it reads.

    Returns:
        What it set, without modules and private names; under `RESULT` the value of its last line, if that has one.
    """
    linecache.cache[filename] = (len(cell.source), None, cell.source.splitlines(keepends=True), filename)
    tree = ast.parse(cell.source, filename)
    namespace: dict[str, object] = {"__name__": "__main__", "__builtins__": builtins, **variables}
    last = tree.body[-1] if tree.body else None
    value: Any = None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, filename, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
    left = {
        name: namespace[name]
        for name in cell.sets
        if name in namespace and not name.startswith("_") and not isinstance(namespace[name], types.ModuleType)
    }
    if value is not None and not cell.source.rstrip().endswith(";"):
        left[RESULT] = value
    return left
