"""Hooks of mkdocs: what the site has beyond the pages of docs/, and the order of its navigation."""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "Tutorial": "tutorial",
    "How to": "howto",
    "Topics": "topics",
    "Reference": "reference",
    "Project": "project",
}
TOP_PAGES = {name: f"project/{name.lower()}" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
"""Pages beside docs/ that the site shows too, and where."""
API = "reference/api.md"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:")


def public_names() -> dict[str, str]:
    """The names of `skyproxy` and the modules that define them, read without importing anything."""
    names: dict[str, str] = {}
    for node in ast.parse((ROOT / "skyproxy" / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_PUBLIC":
            names |= ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names[node.name] = "skyproxy"
    if len(names) < 2:
        raise LookupError("skyproxy/__init__.py has no table _PUBLIC any more; the reference is made from it")
    return names


def api_page() -> str:
    """The reference of the package, for mkdocstrings to fill in."""
    lines = ["# The Python API", "", "Every public name of `import skyproxy`, from its docstring.", ""]
    for name, module in sorted(public_names().items(), key=lambda item: item[0].lower()):
        lines += [f"::: {module}.{name}", "    options:", f"      heading: skyproxy.{name}", ""]
    lines += ["## skyproxy.errors", "", "::: skyproxy.errors", "    options:", "      show_root_heading: false", ""]
    return "\n".join(lines)


def title_of(path: Path) -> str:
    """The first heading of a page."""
    return next(line[2:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    nav: list[dict[str, Any]] = [{"skyproxy": "index.md"}]
    for section, folder in SECTIONS.items():
        entries = {title_of(path): path.relative_to(docs).as_posix() for path in (docs / folder).glob("*.md")}
        if folder == "reference":
            entries["The Python API"] = API
        if folder == "project":
            entries |= {title_of(ROOT / name): place for name, place in TOP_PAGES.items()}
        nav.append({section: [{title: entries[title]} for title in sorted(entries, key=str.lower)]})
    nav += [{title_of(path): path.name} for path in sorted(docs.glob("*.md")) if path.name != "index.md"]
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, API, content=api_page()))
    for name, place in TOP_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and the rest of the repository into links within the site, or into their text alone."""
    docs = Path(config.docs_dir)
    here = docs / page.file.src_uri
    original = next((ROOT / name for name, place in TOP_PAGES.items() if place == page.file.src_uri), here)

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, part = target.partition("#")
        there = (original.parent / path).resolve()
        if EXTERNAL.match(target) or not path or not there.exists():
            return match[0]
        if there.is_relative_to(docs):
            place = there.relative_to(docs).as_posix()
        elif there.parent == ROOT and there.name in TOP_PAGES:
            place = TOP_PAGES[there.name]
        else:
            return text  # a file of the repository that is no page
        up = PurePosixPath(*[".."] * (len(PurePosixPath(page.file.src_uri).parts) - 1))
        return f"[{text}]({up / place}{'#' + part if part else ''})"

    return LINK.sub(link, markdown)
