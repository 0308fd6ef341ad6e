"""The public names of providers: the table, the imports for type checkers and the reference have the same."""

from __future__ import annotations

import ast
from pathlib import Path

from skyproxy import providers

ROOT = Path(__file__).resolve().parents[2]


def for_type_checkers() -> set[str]:
    """What the package imports under `TYPE_CHECKING`, by the names that it gives them."""
    tree = ast.parse((ROOT / "skyproxy/providers/__init__.py").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_every_name_is_known_to_type_checkers() -> None:
    assert for_type_checkers() == set(providers.__all__)


def test_the_reference_has_every_provider() -> None:
    page = (ROOT / "docs/reference/pools.md").read_text(encoding="utf-8")
    classes = {name for name in providers.__all__ if name != "Provider" and hasattr(getattr(providers, name), "launch")}
    assert classes >= {"AWS", "Local", "Remote"}
    assert [name for name in sorted(classes) if f"{name}(" not in page] == []
