"""No module defines what nobody uses: a name that stands once in the packages is used by no code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skyproxy", "skyproxy_server", "operator/skyproxy_operator")
FOR_OTHERS = {
    "skyproxy/integrations/sky_spec.py": "accelerate's test suite reads the names of this file",
    "skyproxy/tensor/torch_api/sky_module.py": "PyTorch and programs look for these names in `torch.sky`",
}
"""Files whose names other programs look for, and who does."""


def unused(sources: dict[str, str], documents: str) -> list[str]:
    """List functions, classes and constants of modules that nothing names but their definition.

    Args:
        sources: the packages' files by path.
        documents: whatever names what programs may use; private names count in the packages only.
    """
    words = Counter(word for text in sources.values() for word in re.findall(r"\w+", text))
    public = set(re.findall(r"\w+", documents))
    found = []
    for path, text in sources.items():
        for node in ast.parse(text).body:
            names: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                # What a decorator registers is called by way of the register.
                names = [] if node.decorator_list else [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            found += [
                f"{path}: {name}"
                for name in names
                if words[name] == 1 and not name.startswith("__") and (name.startswith("_") or name not in public)
            ]
    return found


def test_nothing_is_defined_that_nobody_uses() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.py")]
    found = unused(sources, " ".join(page.read_text(encoding="utf-8") for page in pages))
    assert [row for row in found if row.partition(":")[0] not in FOR_OTHERS] == []
    assert {path for path in FOR_OTHERS if path not in sources} == set()


def test_what_nobody_uses_is_found() -> None:
    sources = {
        "a.py": "from b import used\n_LEFT = 1\ndef _forgotten(): return used\ndef told(): ...\n",
        "b.py": "def used(): ...\n@register\ndef by_table(): ...\nclass Old: ...\n",
    }
    assert unused(sources, "`told` is for programs") == ["a.py: _LEFT", "a.py: _forgotten", "b.py: Old"]
