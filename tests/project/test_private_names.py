"""Private names of PyTorch stand in one file and one package of the client: there a new release is tried."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "skyproxy"
DOORS = ("tensor/core/torch_private.py", "tensor/torch_api/")
OUTSIDE = {
    "fake_guard.py": "shared with the worker: the guard of CUDA's devices where there is no CUDA",
    "payloads/pickling.py": "shared with the worker: whether a class is a tensor made of others",
    "payloads/tensors.py": "shared with the worker: the bits of conjugate and negative views",
    "plugins/process_group.py": "ending a group whose ranks hang",
    "torch_modes.py": "shared with the worker: the table of PyTorch's global modes",
}
"""Files that may not import from `tensor`, each with what it needs."""


def private_names(source: str) -> set[str]:
    """The dotted names in a module that lead into torch by a part with a leading underscore."""
    tree = ast.parse(source)
    meanings: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    meanings[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    found |= {name for node in ast.walk(tree) if (name := _dotted(node, meanings)) is not None}
    return {name for name in found if any(_is_private(part) for part in name.split("."))}


def _dotted(node: ast.AST, meanings: dict[str, str]) -> str | None:
    """What an attribute of torch is called, by its whole name; None for everything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not parts or not isinstance(node, ast.Name) or node.id not in meanings:
        return None
    return ".".join((meanings[node.id], *reversed(parts)))


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._set_conj(x, True)", {"torch._C", "torch._C._set_conj"}),
        ("import torch.utils._pytree as tree", {"torch.utils._pytree"}),
        (
            "from torch.utils import _pytree as tree\ntree.tree_map",
            {"torch.utils._pytree", "torch.utils._pytree.tree_map"},
        ),
        ("from torch._ops import OpOverload", {"torch._ops.OpOverload"}),
        ("def f():\n    from torch import _utils", {"torch._utils"}),
        (
            "from torch.autograd import forward_ad as ad\nad._current_level",
            {"torch.autograd.forward_ad._current_level"},
        ),
        ("import torch\ntorch.ops.aten.add.__name__\nself._C.x", set()),
    ],
)
def test_a_private_name_is_found_however_it_is_reached(source: str, names: set[str]) -> None:
    assert private_names(source) == names


def _users() -> dict[str, set[str]]:
    names = {
        path.relative_to(CLIENT).as_posix(): private_names(path.read_text(encoding="utf-8"))
        for path in CLIENT.rglob("*.py")
    }
    # An op of ATen may begin with an underscore: the schema of an op is public, whatever its name.
    return {
        file: kept
        for file, found in names.items()
        if (kept := {name for name in found if not name.startswith("torch.ops.")})
    }


def test_private_names_of_torch_are_looked_up_in_one_place() -> None:
    users = {file: names for file, names in _users().items() if not file.startswith(DOORS)}
    assert {file: names for file, names in users.items() if file not in OUTSIDE} == {}
    assert set(users) == set(OUTSIDE)
